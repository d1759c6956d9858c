"""What every process of Packhorse speaks: settings, wire messages, errors, logs and the run directory."""

__version__ = "0.1.0"
