"""Per-head profiles: ``snapstream calibrate``."""
