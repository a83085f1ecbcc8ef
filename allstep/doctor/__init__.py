"""Measures machines, networks and training steps, and checks and profiles users' scripts.

Other rooms import from here only.
"""

from allstep.doctor.collectives import measure_collectives
from allstep.doctor.links import measure_pairs
from allstep.doctor.machine import measure_copy_s_per_byte, measure_gemm_flops
from allstep.doctor.measure import measure
from allstep.doctor.measurements import (
    Measurements,
    PairTiming,
    measurements_of,
    read_measurements,
)
from allstep.doctor.profile import NUM_UPDATES, ScriptProfile, profile_script, read_profile
from allstep.doctor.same_machine import compare_machines
from allstep.doctor.script import Failure
from allstep.doctor.shaped_hosts import ShapedHosts, UnavailableError
from allstep.doctor.shaped_link import ShapedCommunicator, TokenBucket
from allstep.doctor.timing import Effort, slowest_s
from allstep.doctor.trial import (
    Training,
    forward_share,
    measure_policy,
    measure_workload,
    sleeping_training,
)
from allstep.doctor.verify.ablation import Factor
from allstep.doctor.verify.causes import Cause
from allstep.doctor.verify.compare import (
    Divergence,
    largest_difference,
    limit_of,
    nonfinite_step,
    total_norm,
)
from allstep.doctor.verify.diagnose import Diagnosis, diagnose
from allstep.doctor.verify.record import (
    RunRecord,
    StepRecord,
    WorkerRecord,
    mesh_text,
    read_worker,
    run_text,
)
from allstep.doctor.verify.rounding import Rounding
from allstep.doctor.verify.script import RecordRequest, record_path, record_script

__all__ = [
    "NUM_UPDATES",
    "Cause",
    "Diagnosis",
    "Divergence",
    "Effort",
    "Factor",
    "Failure",
    "Measurements",
    "PairTiming",
    "RecordRequest",
    "Rounding",
    "RunRecord",
    "ScriptProfile",
    "ShapedCommunicator",
    "ShapedHosts",
    "StepRecord",
    "TokenBucket",
    "Training",
    "UnavailableError",
    "WorkerRecord",
    "compare_machines",
    "diagnose",
    "forward_share",
    "largest_difference",
    "limit_of",
    "measure",
    "measure_collectives",
    "measure_copy_s_per_byte",
    "measure_gemm_flops",
    "measure_pairs",
    "measure_policy",
    "measure_workload",
    "measurements_of",
    "mesh_text",
    "nonfinite_step",
    "profile_script",
    "read_measurements",
    "read_profile",
    "read_worker",
    "record_path",
    "record_script",
    "run_text",
    "sleeping_training",
    "slowest_s",
    "total_norm",
]
