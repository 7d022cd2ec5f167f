"""Recipe C, row 5: "NCCL error" names no cause; a reboot was to cure it, or NCCL_DEBUG=INFO.

No NCCL runs on a CPU, so the text is one of others. Judged by it: the variable is right, since the
line NCCL WARN names shared memory, and access to /dev/shm cured it; a reboot, or other versions,
would have changed nothing.
"""
recorded = 'nccl_shared_memory.txt'
