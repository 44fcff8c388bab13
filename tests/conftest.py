"""What all tests need."""

import signal

# A shell without job control starts its background commands with SIGINT ignored, and children
# inherit that: then Ctrl-C, which many tests send, would reach nobody.
signal.signal(signal.SIGINT, signal.default_int_handler)
