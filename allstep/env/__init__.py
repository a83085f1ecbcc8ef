"""What the launcher says in the environment; the only room that touches os.environ."""

from allstep.env.descriptors import make_room as make_room
from allstep.env.launch import Launch as Launch
from allstep.env.launchers import read_launch as read_launch
from allstep.env.slurm import expand_counts as expand_counts
from allstep.env.slurm import first_host as first_host
from allstep.env.worker import environment_of_worker as environment_of_worker
from allstep.env.worker import forget_launch as forget_launch
from allstep.env.worker import read_error_file as read_error_file
from allstep.env.worker import read_num_threads as read_num_threads
from allstep.env.worker import set_environment as set_environment
