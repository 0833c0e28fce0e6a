"""The command line: a thin face over exporter and runtime."""
