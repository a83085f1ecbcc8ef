"""Workers of an elastic training on simulated machines: one failure is one number.

Workers are threads of which one runs at a time, on a clock of their own. All that they ask of
others, of the network, the store and the clock, is a moment at which another may go on, time may
pass, and a worker may be lost. Which of these happens, its seed decides.
"""
