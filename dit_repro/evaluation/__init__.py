"""Chapter 7: features, their statistics, and scores that say what they were measured under."""
from dit_repro.evaluation.bias import bootstrap_interval, distance_by_count, extrapolate
from dit_repro.evaluation.classifier import SmallClassifier, accuracy, load_classifier
from dit_repro.evaluation.features import FeatureExtractor, Features, InceptionFeatures
from dit_repro.evaluation.fidelity import inception_score, kernel_distance, precision_recall
from dit_repro.evaluation.frechet import frechet_distance
from dit_repro.evaluation.protocol import Protocol
from dit_repro.evaluation.statistics import FeatureStatistics

__all__ = [
    "FeatureExtractor", "FeatureStatistics", "Features", "InceptionFeatures", "Protocol", "SmallClassifier", "accuracy",
    "bootstrap_interval", "distance_by_count", "extrapolate", "frechet_distance", "inception_score", "kernel_distance",
    "load_classifier", "precision_recall",
]
