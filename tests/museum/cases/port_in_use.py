"""A run of before still listens on the port of rank 0."""
import socket

from torch.distributed import TCPStore

from llm_workbook.parallel.ranks import free_port


def listen(port): return TCPStore('127.0.0.1', port, 1, is_master=True).port


def broken():
    with socket.create_server(('127.0.0.1', free_port())) as other:
        listen(other.getsockname()[1])


def mended():
    port = free_port()
    assert listen(port) == port
