"""What scaling would bring, from numbers alone: nothing here needs torch."""

from allstep.plan.cluster import Cluster, Link
from allstep.plan.cluster_files import preset_names, read_cluster
from allstep.plan.fit import Fit, Timing, fit_link
from allstep.plan.job import Job
from allstep.plan.noise_scale import NoiseScale
from allstep.plan.policy import POLICIES, Policy
from allstep.plan.scaling import Prediction, predict
from allstep.plan.step_report import StepReport
from allstep.plan.stragglers import Stragglers
from allstep.plan.time_to_target import Target
from allstep.plan.workload import Workload

__all__ = [
    "Cluster",
    "Link",
    "preset_names",
    "read_cluster",
    "Fit",
    "Timing",
    "fit_link",
    "Job",
    "Workload",
    "POLICIES",
    "Policy",
    "Prediction",
    "StepReport",
    "Stragglers",
    "predict",
    "NoiseScale",
    "Target",
]
