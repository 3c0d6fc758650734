"""Machines described by facts, and the helper that makes a sysfs tree of one."""
