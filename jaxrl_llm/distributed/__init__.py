"""Devices and processes: the mesh and its sharding tables, several processes that act as one."""
