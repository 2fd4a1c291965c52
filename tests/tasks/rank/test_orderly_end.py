"""The last things that a rank does once its result is known: in processes of their own, which end by it."""

import subprocess
import sys
import time

PROGRAM = """
import atexit, ctypes, os, threading, time
from concurrent.futures import ThreadPoolExecutor
from prefect_torch.tasks.rank.program import orderly_end

def wait_and_print(seconds, text):
    time.sleep(seconds)
    print(text, flush=True)

{function}
orderly_end.LONGEST_S, orderly_end._OF_NATIVE_CODE_S = {limit_s}, {native_s}
orderly_end.end_in_order(lambda: {leave}, lambda: print("cleaned up", flush=True))
os._exit(5)
"""


def end(function, limit_s, leave="None", native_s=60):
    program = PROGRAM.format(function=function, limit_s=limit_s, leave=leave, native_s=native_s)
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert time.monotonic() - began_s < 60
    return done.returncode, done.stdout, done.stderr


def test_threads_are_joined_before_what_is_registered_for_the_exit_runs():
    function = (
        "atexit.register(print, 'hook', flush=True)\natexit.register(lambda: 1 / 0)\n"
        "threading.Thread(target=wait_and_print, args=(0.1, 'thread')).start()\n"
        "ThreadPoolExecutor(1).submit(wait_and_print, 0.2, 'executor')"
    )
    returncode, out, err = end(function, 60)
    assert (returncode, out.split()) == (5, ["thread", "executor", "hook"])
    assert "ZeroDivisionError" in err


def test_finalizers_run_but_for_those_that_unregister_torchs_operators():
    """Some two hundred, each a millisecond, in a process that is about to end."""
    function = (
        "import weakref\ndef unregister(): print('unregistered', flush=True)\nunregister.__module__ = 'torch.library'\n"
        "kept = [type('Kept', (), {})() for _ in range(2)]\n"
        "weakref.finalize(kept[0], unregister)\nweakref.finalize(kept[1], print, 'finalized', flush=True)"
    )
    assert end(function, 60) == (5, "finalized\n", "")


def test_what_does_not_end_is_named_and_costs_no_more_than_the_limit():
    returncode, out, err = end("threading.Thread(target=time.sleep, args=(600,), name='upload').start()", 0.2)
    assert (returncode, out) == (0, "cleaned up\n")
    assert "WARNING: the function has returned 0.2 s ago, and its thread upload has not ended" in err
    returncode, out, err = end("atexit.register(time.sleep, 600)", 0.2)
    assert (returncode, out) == (0, "cleaned up\n")
    assert "what it has registered with atexit has not ended" in err


def test_the_process_group_is_left_last_and_named_if_it_does_not_end():
    """As with NCCL, which waits for CUDA graphs that hold collectives: what has been registered is done by then."""
    hook = "atexit.register(print, 'hook', flush=True)"
    assert end(hook, 60, "print('left', flush=True)") == (5, "hook\nleft\n", "")
    returncode, out, err = end(hook, 1, "time.sleep(600)")
    assert (returncode, out) == (0, "hook\ncleaned up\n")
    assert "its process group (a CUDA graph that holds collectives keeps it) has not ended" in err
    returncode, out, _ = end(hook, 1, "ctypes.PyDLL(None).sleep(600)", 0.3)
    assert (returncode, out) == (1, "hook\n")


def test_native_code_that_lets_no_thread_run_ends_with_its_stack_traces():
    returncode, _, err = end("atexit.register(ctypes.PyDLL(None).sleep, 600)", 1, native_s=0.3)
    assert returncode == 1
    assert "most recent call first" in err
