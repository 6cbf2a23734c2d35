"""Signals end a command: exit code, clean-up, no traceback, although threads are in C++."""

import os
import signal
import subprocess
import sys

import pytest

COMPILING = """
import concurrent.futures, sys, threading, time
from omni_jax import interrupts

def command():
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            future = pool.submit(time.sleep, 600)  # as XLA compiles: without Python's lock, not to be interrupted
            try:
                print("ready", flush=True)
                future.result()
            finally:
                print("cleaned", flush=True)
    finally:
        print("never, since the thread has not ended", flush=True)

interrupts.run(command)
"""
ASKING = """
import time
from omni_jax import interrupts

def command():
    interrupts.leave_to_python()
    for _ in range(2):
        try:
            print("ready", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print("asked again", flush=True)
    return 7

interrupts.run(command)
"""


def start(program: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_op_01_a_signal_ends_a_command_whose_threads_compile(number):
    process = start(COMPILING)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + number, "cleaned\n", "")


def test_a_command_may_take_ctrl_c_back():
    process = start(ASKING)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked again\n"
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (7, "asked again\n", "")
    process = start(ASKING)
    process.send_signal(signal.SIGTERM)
    assert (process.wait(timeout=60), process.communicate()) == (143, ("", ""))


@pytest.mark.parametrize(("program", "code"), [("return 3", 3), ("sys.exit(4)", 4), ("return None", 0)])
def test_the_exit_code_is_the_command_s(program, code):
    source = f"import sys\nfrom omni_jax.interrupts import run\ndef command():\n    {program}\nrun(command)"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == code
