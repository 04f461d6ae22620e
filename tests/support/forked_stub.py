"""A process that Ray starts as a worker: the server of its kind forks the worker, and this one waits for its end.

Run with the sockets of the servers (of engines, and of others), and the command line of the worker. With STARTED_ANEW
it becomes the worker itself, as without the servers.
"""

import array
import json
import os
import socket
import sys

engines, others, *arguments = sys.argv[1:]
if "STARTED_ANEW" in os.environ:
    os.execv(sys.executable, [sys.executable, *arguments])
server = socket.socket(socket.AF_UNIX)
server.connect(engines if "VLLM_ENABLE_V1_MULTIPROCESSING" in os.environ else others)
wanted = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
files = array.array("i", (0, 1, 2))
server.sendmsg([json.dumps(wanted).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
server.recv(1)
