"""Chapter 7: features, their statistics, and scores that say what they were measured under."""
from dit_repro.evaluation.behavior import condition_information, find_copies
from dit_repro.evaluation.bias import (
    bootstrap_interval,
    distance_by_count,
    expected_floor,
    extrapolate,
    influence,
    noise_floor,
    standard_error,
)
from dit_repro.evaluation.classifier import SmallClassifier, accuracy, load_classifier
from dit_repro.evaluation.doctor import Finding, check_anchors, diagnose
from dit_repro.evaluation.extract import FeatureSet, extract
from dit_repro.evaluation.features import DINOV2, FeatureExtractor, Features, InceptionFeatures, TimmFeatures
from dit_repro.evaluation.fidelity import inception_score, kernel_distance, precision_recall
from dit_repro.evaluation.frechet import frechet_distance
from dit_repro.evaluation.image_sets import write_npz
from dit_repro.evaluation.per_class import class_frechet, pixel_std, rank_classes, replay_labels, second_mode
from dit_repro.evaluation.protocol import Protocol
from dit_repro.evaluation.scores import Scores, evaluate
from dit_repro.evaluation.statistics import FeatureStatistics

__all__ = [
    "DINOV2", "FeatureExtractor", "FeatureSet", "FeatureStatistics", "Features", "Finding", "InceptionFeatures",
    "Protocol", "Scores", "SmallClassifier", "TimmFeatures", "accuracy", "bootstrap_interval", "check_anchors",
    "class_frechet", "condition_information", "diagnose", "distance_by_count", "evaluate", "expected_floor",
    "extract", "extrapolate", "find_copies", "frechet_distance", "inception_score", "influence", "kernel_distance",
    "load_classifier", "noise_floor", "pixel_std", "precision_recall", "rank_classes", "replay_labels",
    "second_mode", "standard_error", "write_npz",
]
