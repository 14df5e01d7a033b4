"""SGLang's HTTP server with weight sessions."""

import os
import sys

if __name__ == "__main__":
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from rollout.plugin import weights

    args = prepare_server_args(sys.argv[1:])
    weights.install(http_server.app, args, dtype="float32")
    try:
        http_server.launch_server(args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
