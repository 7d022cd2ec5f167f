"""Recipe C, row 5: "NCCL error" names no cause; a reboot was to cure it, or NCCL_DEBUG=INFO.

No NCCL runs on a CPU, so this is a real text. Judged by it: the variable is right (its NCCL WARN
line names shared memory), a reboot or other versions would have changed nothing.
"""
RECORDED = 'nccl_shared_memory.txt'


def mended():
    "The library asks before a run how large the shared memory of this machine is."
    from llm_workbook.launching.node_report import node_report
