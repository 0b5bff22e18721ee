"""Placements: deciders, NamedShardings, placed arrays and sharding constraints."""
