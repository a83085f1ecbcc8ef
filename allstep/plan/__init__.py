"""Predicts what more workers would bring, from figures only; nothing here needs torch."""

from allstep.plan.accuracy import AccuracyCost, AccuracyTable, measured_accuracy
from allstep.plan.cluster import Cluster
from allstep.plan.cluster_files import preset_names, read_cluster
from allstep.plan.describe import chart, plain_data, seconds_text, timeline, times_text
from allstep.plan.fit import Fit, Timing, fit_link
from allstep.plan.growth import Growth
from allstep.plan.learning_curve import (
    HeldOutErrors,
    Interval,
    LearningCurve,
    fit_learning_curve,
)
from allstep.plan.measured_collective import MeasuredCollective
from allstep.plan.memory import Memory, memory_of
from allstep.plan.mesh import MeshSpec
from allstep.plan.mesh_advice import MeshAdvice, MeshOption, recommend_mesh
from allstep.plan.next_step import RunNumbers, next_step
from allstep.plan.nodes import Link
from allstep.plan.noise_scale import NoiseScale
from allstep.plan.pipeline import PipelineSpec
from allstep.plan.policies import DDP, POLICIES, PolicySpec
from allstep.plan.predict import WORTH_ADDING, Prediction, predict, predict_mesh
from allstep.plan.price import Price, work_s
from allstep.plan.recommend import Recommendation, recommend
from allstep.plan.simulate import StepReport, simulate
from allstep.plan.stragglers import Stragglers
from allstep.plan.time_to_target import Target
from allstep.plan.transformer import TransformerSpec
from allstep.plan.workload import TrainingSpec, Workload

__all__ = [
    "DDP",
    "POLICIES",
    "WORTH_ADDING",
    "AccuracyCost",
    "AccuracyTable",
    "Cluster",
    "Fit",
    "Growth",
    "HeldOutErrors",
    "Interval",
    "LearningCurve",
    "Link",
    "MeasuredCollective",
    "Memory",
    "MeshAdvice",
    "MeshOption",
    "MeshSpec",
    "NoiseScale",
    "PipelineSpec",
    "PolicySpec",
    "Prediction",
    "Price",
    "Recommendation",
    "RunNumbers",
    "StepReport",
    "Stragglers",
    "Target",
    "Timing",
    "TrainingSpec",
    "TransformerSpec",
    "Workload",
    "chart",
    "fit_learning_curve",
    "fit_link",
    "measured_accuracy",
    "memory_of",
    "next_step",
    "plain_data",
    "predict",
    "predict_mesh",
    "preset_names",
    "read_cluster",
    "recommend",
    "recommend_mesh",
    "seconds_text",
    "simulate",
    "timeline",
    "times_text",
    "work_s",
]
