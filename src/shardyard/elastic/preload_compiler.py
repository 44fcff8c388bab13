"""Imports what compiles, once for all workers of a node; the fork server imports this."""

from shardyard.torch_private import import_compiler

import_compiler()
