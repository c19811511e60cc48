"""What makes the training of a model dense or wrong, found by tracing it: `doctor`."""

from rowstep.optimizers.diagnosis.doctor import doctor
from rowstep.optimizers.diagnosis.findings import Finding, report

__all__ = ["Finding", "doctor", "report"]
