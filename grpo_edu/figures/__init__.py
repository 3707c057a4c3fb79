"""Pictures: functions that take numbers and return a figure."""
