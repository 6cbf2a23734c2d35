"""benchmarks.gpu_proof: lists, verdicts, processes, and the output if nothing can be compiled.

`make gpu-proof` runs the proofs; the last test here needs the CUDA plugin.
"""

import dataclasses
import json
import subprocess
from collections import Counter

import pytest

from benchmarks.gpu_proof import __main__ as gpu_proof
from benchmarks.gpu_proof import programs as gpu_proof_programs
from benchmarks.gpu_proof.finding import (
    COPY,
    MMA,
    Finding,
    collective_faults,
    kernel_faults,
    program_faults,
)
from kernels_pallas import aot
from kernels_pallas.aot import Collective, Resources

KERNEL = Resources(
    name="paged_decode",
    arch="sm_80",
    registers=72,
    stack=0,
    spill_stores=0,
    spill_loads=0,
    shared=20736,
    ptx=Counter({"cp.async.cg.shared.global": 26, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": 16}),
    register_wgmma=0,
    losses=(),
)
EXPECTED = {"cp.async": COPY, "mma": MMA}
STEP = {"aliased": 900, "donated": 900, "temporaries": 10, "bound": 16, "arguments": 1000, "planned": 1000}
CALLS = {"calls": {"paged_decode": 24, "write_kv": 24}, "layers": 24, "expected": ("paged_decode", "write")}


class TestVerdicts:
    def test_a_kernel_without_faults(self):
        assert kernel_faults(KERNEL, limit=166912, expected=EXPECTED) == ()

    @pytest.mark.parametrize(
        ("change", "fault"),
        [
            ({"spill_stores": 8, "spill_loads": 4}, "8 bytes of stores and 4 bytes of loads spill"),
            ({"shared": 170000}, "170000 bytes of shared memory, expected at most 166912 a block"),
            ({"ptx": Counter({"ld.global.b32": 9, "mma.sync.x": 1})}, "no cp.async instruction"),
            ({"ptx": Counter({"fma.rn.f32": 9, "cp.async.cg.shared.global": 1})}, "no mma instruction"),
            ({"losses": ("wgmma.mma_async instructions are serialized",)}, "are serialized"),
        ],
    )
    def test_faults_of_a_kernel(self, change, fault):
        (found,) = kernel_faults(dataclasses.replace(KERNEL, **change), limit=166912, expected=EXPECTED)
        assert fault in found

    def test_a_step_without_faults(self):
        assert program_faults(**STEP, **CALLS) == ()

    @pytest.mark.parametrize(
        ("change", "fault"),
        [
            ({"aliased": 0}, "0 bytes are written in place, expected the 900 donated"),
            ({"pool_copies": 2}, "2 instructions copy an array of the size of a layer's keys"),
            ({"temporaries": 17}, "17 bytes of temporaries, expected at most 16"),
            ({"arguments": 2000}, "2000 bytes of arguments on a device, expected 1000"),
            ({"calls": {"paged_decode": 24}}, "no called kernel has 'write' in its name"),
            ({"calls": {"paged_decode": 24, "write_kv": 48}}, "48 calls of write_kv in 24 layers"),
        ],
    )
    def test_faults_of_a_step(self, change, fault):
        (found,) = program_faults(**(STEP | CALLS | change))
        assert fault in found

    def test_faults_of_collectives(self):
        layer = Collective(kind="all-reduce", results=(("bf16", (32, 896)),))
        both = Collective(kind="all-reduce", results=(("bf16", (32, 896)), ("bf16", (32, 896))))
        logits = Collective(kind="all-gather", results=(("f32", (2, 32, 75968)),))
        assert collective_faults([layer, both], sums=3, largest=32 * 896) == ()
        assert collective_faults([layer], sums=3, largest=32 * 896) == ("1 all-reduces, expected 3",)
        assert "4861952 numbers" in collective_faults([logits], sums=None, largest=32 * 40)[0]


class TestCommand:
    def test_help_has_an_example(self, capsys):
        with pytest.raises(SystemExit) as ended:
            gpu_proof.main(["--help"])
        assert ended.value.code == 0
        assert "--only triton-decode/h100" in capsys.readouterr().out

    def test_the_lists_of_both_matrices(self, capsys):
        assert gpu_proof.main(["--list"]) == 0
        small = capsys.readouterr().out.split()
        assert gpu_proof.main(["--full", "--list"]) == 0
        wide = capsys.readouterr().out.split()
        assert set(small) < set(wide)
        assert len(set(wide)) == len(wide)
        for kind in ("triton-decode", "triton-mixed", "triton-write"):
            for target in aot.TARGETS:
                assert f"{kind}/{target}/d128-p16-g7-bfloat16" in small
        assert "mosaic-decode/h200/d128-p16-g7-bfloat16" in small
        assert not [name for name in wide if name.startswith("mosaic-decode/a100")]
        assert "decode/h100/qwen2-0.5b" in small
        assert "tower/h100/qwen2-vl-7b" in wide

    def test_a_name_that_matches_nothing(self, capsys):
        assert gpu_proof.main(["--only", "cutlass"]) == 1
        assert "no name of a proof matches 'cutlass'" in capsys.readouterr().err

    @pytest.mark.parametrize(("flags", "code"), [([], gpu_proof.UNAVAILABLE), (["--skip-unavailable"], 0)])
    def test_without_the_plugin_one_line_is_printed(self, flags, code, monkeypatch, capsys):
        monkeypatch.setattr(aot, "available", lambda: "the CUDA plugin of JAX is not installed")
        assert gpu_proof.main(flags) == code
        (line,) = capsys.readouterr().out.splitlines()
        assert line == "GPU PROOF SKIPPED, nothing was checked: the CUDA plugin of JAX is not installed"

    @pytest.mark.parametrize(("faults", "code"), [((), 0), (("8 bytes spill",), 1)])
    def test_exit_code_and_files(self, faults, code, monkeypatch, capsys, tmp_path):
        def prove(names, processes):
            return [Finding(proof=name, what="kernel", target="a100", registers=72, faults=faults) for name in names]

        monkeypatch.setattr(gpu_proof, "prove", prove)
        monkeypatch.setattr(aot, "available", lambda: None)
        monkeypatch.setattr(aot, "ptxas_version", lambda: "ptxas 12.9.86")
        file = tmp_path / "found.json"
        assert gpu_proof.main(["--only", "triton-write/a100/d64", "--json", str(file)]) == code
        out = capsys.readouterr().out
        assert ("does not hold" if faults else "holds") in out
        assert ("DOES NOT HOLD  triton-write/a100/d64-p16-g7-bfloat16: kernel: 8 bytes spill" in out) == bool(faults)
        assert json.loads(file.read_text())["findings"][0]["registers"] == 72


class TestProcesses:
    def test_a_compiler_that_ends_its_process_ends_one_proof_only(self, monkeypatch):
        """If LLVM aborts, earlier proofs keep their findings, and later ones get a new process."""

        def run(command):
            names = command[command.index("--prove") + 1 :]
            printed, died = [], ""
            for name in names:
                if name.endswith("bad"):
                    died = "trace\nLLVM ERROR: Cannot select: intrinsic\n"
                    break
                finding = dataclasses.asdict(Finding(proof=name, what=name, target="h100"))
                printed.append(json.dumps({"findings": [finding]}))
            return subprocess.CompletedProcess(command, -6 if died else 0, "\n".join(printed), died)

        monkeypatch.setattr(gpu_proof, "_run", run)
        names = ["k/h100/one", "k/h100/bad", "k/h100/two", "k/a100/bad"]
        found = gpu_proof.prove(names, processes=1)
        assert [finding.proof for finding in found] == names
        dead = "LLVM ERROR: Cannot select: intrinsic"
        assert [finding.faults for finding in found] == [(), (dead,), (), (dead,)]

    @pytest.mark.parametrize(
        ("stderr", "reason"),
        [
            ("I0000 cudart_stub\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Shared memory\n----\nFor simplicity\n",
             "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Shared memory"),
            ("LLVM ERROR: Cannot select\nStack dump:\n", "LLVM ERROR: Cannot select"),
            ("killed\n\n", "killed"),
            ("", "exit code -9"),
        ],
    )  # fmt: skip
    def test_the_reason_of_a_process_that_ended(self, stderr, reason):
        assert gpu_proof.reason_of_end(subprocess.CompletedProcess([], -9, "", stderr)) == reason

    def test_a_proof_that_takes_too_long(self, monkeypatch):
        monkeypatch.setattr(gpu_proof, "TIMEOUT", 0.2)
        done = gpu_proof._run(["sleep", "60"])
        assert done.returncode == 124
        assert "not done after 0.2 s" in done.stderr


@pytest.mark.gpu_proof
@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_a_step_without_donation_does_not_hold():
    """A body whose caller does not donate the pool."""
    model = dataclasses.replace(gpu_proof_programs.MODELS["h100/qwen2-0.5b-xla"], layers=1)
    runner, _ = gpu_proof_programs.make_runner("h100", model)
    compiled, job = gpu_proof_programs.compile_job(runner, ("decode", gpu_proof_programs.ROWS), donate=())
    memory = compiled.memory_analysis()
    shape = job.arguments[1][0].shape
    assert memory.alias_size_in_bytes == 0
    assert aot.copies_of(compiled, shape) >= 2  # keys and values
    compiled, _ = gpu_proof_programs.compile_job(runner, ("decode", gpu_proof_programs.ROWS))
    assert compiled.memory_analysis().alias_size_in_bytes > 2 * 2 * shape[0] * shape[1] * shape[2] * shape[3]
    assert aot.copies_of(compiled, shape) == 0
