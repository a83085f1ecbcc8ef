"""What the launcher says in the environment; the only room that touches os.environ."""

from allstep.env.addresses import address_towards as address_towards
from allstep.env.addresses import interface_of as interface_of
from allstep.env.addresses import is_loopback as is_loopback
from allstep.env.addresses import own_addresses as own_addresses
from allstep.env.addresses import read_gloo_interface as read_gloo_interface
from allstep.env.addresses import set_gloo_interface as set_gloo_interface
from allstep.env.hosts import environment_of_agent as environment_of_agent
from allstep.env.hosts import read_carried as read_carried
from allstep.env.hosts import read_ssh_address as read_ssh_address
from allstep.env.launch import Launch as Launch
from allstep.env.launchers import read_launch as read_launch
from allstep.env.limits import make_room as make_room
from allstep.env.limits import num_cores as num_cores
from allstep.env.processes import ProcessStat as ProcessStat
from allstep.env.processes import read_stat as read_stat
from allstep.env.slurm import expand_counts as expand_counts
from allstep.env.slurm import first_host as first_host
from allstep.env.worker import RUN_DIR as RUN_DIR
from allstep.env.worker import environment_of_joiner as environment_of_joiner
from allstep.env.worker import environment_of_worker as environment_of_worker
from allstep.env.worker import forget_launch as forget_launch
from allstep.env.worker import read_agent_id as read_agent_id
from allstep.env.worker import read_error_file as read_error_file
from allstep.env.worker import read_num_threads as read_num_threads
from allstep.env.worker import read_run_dir as read_run_dir
from allstep.env.worker import set_environment as set_environment
