"""Compilation for GPUs without one: parsers, lowering, and, if the CUDA plugin is installed, proofs that must fail.

The snippets are shortened output of the tools (ptxas 12.9, JAX 0.10.2 and 0.12).
"""

import importlib.metadata

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu_proof import kernels as cases
from benchmarks.gpu_proof.finding import COPY, MMA, WGMMA, kernel_faults
from kernels_pallas import aot
from kernels_pallas.paged_attention import PagedBatch, triton_mixed
from kernels_pallas.paged_attention.settings import MixedSettings
from kernels_pallas.pallas import pl, triton

pytestmark = pytest.mark.smoke

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_mixed' for 'sm_80'
ptxas info    : Function properties for paged_mixed
    128 bytes stack frame, 136 bytes spill stores, 124 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 128 bytes stack frame
ptxas info    : Compile time = 597.497 ms
ptxas info    : Compiling entry function 'kernel_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for kernel_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 104 registers, used 2 barriers, 1 bytes smem
"""
LOSS = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the wgmma pipeline in the function 'paged_mixed'\n"
)
PTX = """
.version 8.8
.target sm_90a
.visible .entry paged_mixed(
	.param .u64 .ptr .global .align 1 paged_mixed_param_0
)
.maxntid 128, 1, 1
{
	.reg .pred 	%p<46>;
	ld.param::entry.b64 	%rd12, [paged_mixed_param_0];
	// begin inline asm
	@%p11 cp.async.ca.shared.global [ %r75 + 0 ], [ %rd40 + 0 ], 0x4, %p10;
	// end inline asm
	@!%p2 bra 	$L__BB0_2;
	cp.async.commit_group;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r201,%r202}, %rd77, %rd82, 0, 1, 1, 0, 0;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r201,%r202}, {%r9,%r10}, %rd82, 0, 1, 1, 0;
	{ .reg .pred p; setp.ne.b32 p, %r66, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r1}, %rd6, %rd7, p; }
	ret;
}
.visible .entry loop_pad_fusion(
	.param .u64 loop_pad_fusion_param_0
)
{
	mov.u32 	%r1, %ctaid.x;
	ret;
}
"""
THUNKS = """001: kCustomKernel [source       | next=002 (1)] loop_pad_fusion grid: [256, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
002: kCustomKernel [prev=001 (1) | next=003 (1)] paged_decode grid: [16, 2, 8] threads: [128, 1, 1]  shared_memory: 20736 bytes
003: kCustomCall   [prev=002 (1) | next=004 (1)] kCustomCall
004: kCustomKernel [prev=003 (1) | sink        ] paged_decode grid: [16, 2, 1] threads: [128, 1, 1]  shared_memory: 4096 bytes
"""  # noqa: E501
HLO = """
  %param_0.1 = bf16[512,2,16,64]{3,2,1,0} parameter(0), metadata={scheduling_name="param_0.1"}
  %copy.2 = bf16[512,2,16,64]{3,2,1,0} copy(%x.1)
  %copy.3 = bf16[512,2,16,32]{3,2,1,0} copy(%x.2)
  %copy-start = (bf16[512,2,16,64]{3,2,1,0}, bf16[512,2,16,64]{3,2,1,0:S(5)}, u32[]) copy-start(%copy.2)
  %convert = f32[512,2,16,64]{3,2,1,0} convert(%param_0.1)
  ROOT %dus = bf16[512,2,16,64]{3,2,1,0} dynamic-update-slice(%param_0.1, %copy.9)
  %psum.7.2 = bf16[32,128]{1,0} all-reduce(%param_0.6), channel_id=1, to_apply=%region_0.0
  %ar = (bf16[32]{0}, f32[]) all-reduce-start(%a, %b), channel_id=2
  %ard = (bf16[32]{0}, f32[]) all-reduce-done(%ar)
  %all-reduce-start = ((bf16[512,8192]{1,0}), bf16[512,8192]{1,0}) all-reduce-start(%bitcast.3.0), channel_id=1
  %all-reduce-done = bf16[512,8192]{1,0} all-reduce-done(%all-reduce-start)
  %all_gather.7.2 = bf16[2,32,448]{2,1,0} all-gather(%bitcast.4), channel_id=1, dimensions={0}
  %fusion = bf16[2,32,448]{2,1,0} fusion(%all_gather.7.2), kind=kLoop, calls=%wrapped
"""


class TestParsers:
    def test_registers_and_spills(self):
        found = aot.parse_ptxas(PTXAS)
        assert found["paged_mixed"] == {
            "registers": 255,
            "stack": 128,
            "spill_stores": 136,
            "spill_loads": 124,
            "static": 0,
        }
        assert found["kernel_mosaic_gpu_kernel"]["static"] == 1
        with pytest.raises(RuntimeError, match="unknown format of ptxas's report"):
            aot.parse_ptxas("ptxas info : Compiling entry function 'a' for 'sm_80'\nUsed many registers")

    def test_performance_warnings_by_kernel(self):
        assert "serialized due to insufficient register" in aot.parse_losses(PTXAS + 2 * LOSS, "paged_mixed")[0]
        assert len(aot.parse_losses(PTXAS + 2 * LOSS, "paged_mixed")) == 1
        assert aot.parse_losses(PTXAS + LOSS, "paged_decode") == ()

    def test_instructions_by_kernel(self):
        bodies = aot.split_ptx(PTX)
        assert list(bodies) == ["paged_mixed", "loop_pad_fusion"]
        count = aot.count_ptx(bodies["paged_mixed"])
        assert count["cp.async.ca.shared.global"] == count["cp.async.commit_group"] == 1
        assert count["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"] == 2
        assert count["wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"] == 1
        assert count["bra"] == count["ret"] == count["setp.ne.b32"] == 1
        assert aot.count_ptx(bodies["loop_pad_fusion"]) == {"mov.u32": 1, "ret": 1}

    def test_shared_memory(self):
        assert aot.parse_launches(THUNKS) == {"loop_pad_fusion": 0, "paged_decode": 20736}
        line = "threads in (%c128, %c1, %c1)  dynamic_shared_memory_size %c84024_i32 args(%62 : !llvm.ptr)"
        assert aot.parse_mosaic_shared(line) == 84024

    def test_copies_of_an_array_are_counted(self):
        assert aot.count_copies(HLO, (512, 2, 16, 64)) == 3
        assert aot.count_copies(HLO, (512, 2, 16)) == 0

    def test_collectives(self):
        assert [(each.kind, each.results) for each in aot.parse_collectives(HLO)] == [
            ("all-reduce", (("bf16", (32, 128)),)),
            ("all-reduce", (("bf16", (32,)), ("f32", ()))),
            ("all-reduce", (("bf16", (512, 8192)),)),
            ("all-gather", (("bf16", (2, 32, 448)),)),
        ]


class TestTargets:
    def test_device_kinds_and_shared_memory(self):
        assert [aot.device_kind(target) for target in aot.TARGETS] == [
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA H100 80GB HBM3",
            "NVIDIA H200",
        ]
        # CUDA C++ programming guide, "maximum amount of shared memory per thread block": 163 KB and 227 KB.
        assert [aot.shared_limit(target) for target in aot.TARGETS] == [163 << 10, 227 << 10, 227 << 10]

    def test_an_unknown_target_is_refused(self):
        with pytest.raises(ValueError, match="target must be one of a100, h100, h200, got 'b300'"):
            aot.mesh("b300")

    def test_a_mesh_of_another_size_is_refused(self):
        with pytest.raises(ValueError, match="8 devices do not make a mesh"):
            aot.mesh("h100", 8, shape=(2, 2))


class TestMissingTools:
    def versions(self, monkeypatch, **found):
        def version(name):
            if name not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "files", lambda name: [])

    def test_no_plugin(self, monkeypatch):
        self.versions(monkeypatch)
        assert "the CUDA plugin of JAX is not installed: pip install --no-deps" in (aot.available() or "")
        with pytest.raises(aot.ToolMissing, match="plugin"):
            aot.mesh("h100")

    def test_a_plugin_for_another_jax(self, monkeypatch):
        self.versions(monkeypatch, **{"jax-cuda12-plugin": "0.4.1"})
        assert f"jax-cuda12-plugin is 0.4.1 but JAX is {jax.__version__}" in (aot.available() or "")

    def test_no_assembler(self, monkeypatch):
        self.versions(monkeypatch, **{"jax-cuda12-plugin": jax.__version__, "jax-cuda12-pjrt": jax.__version__})
        assert aot.available() == ("no installed wheel has ptxas: pip install --no-deps nvidia-cuda-nvcc-cu12")


# JAX warns so for every Triton kernel from 0.11 on. There are no Mosaic kernels for mixed batches yet.
triton_is_deprecated = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


@triton_is_deprecated
@pytest.mark.parametrize(
    ("kernel", "case"),
    [(kernel, case) for kernel in cases.KERNELS for case in cases.QUICK if cases.computes(kernel, case)],
    ids=str,
)
def test_kernels_lower_for_cuda_without_the_plugin(kernel, case):
    function, arguments, _ = cases.program(kernel, case)
    text = aot.lower_for("h100", function, arguments).as_text()
    assert ("mosaic_gpu" if kernel.startswith("mosaic") else "__gpu$xla.gpu.triton") in text


@triton_is_deprecated
def test_lowering_an_invalid_kernel_fails():
    def kernel(x, out):
        out[...] = x[...]

    array = jax.ShapeDtypeStruct((48, 128), jnp.float32)
    function = pl.pallas_call(kernel, out_shape=array, compiler_params=triton.CompilerParams(num_warps=4))
    with pytest.raises(Exception, match="power of 2"):
        aot.lower_for("h100", function, (array,))


needs_plugin = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))


@pytest.mark.gpu_proof
@needs_plugin
@triton_is_deprecated
class TestProofsCanFail:
    @pytest.fixture
    def analyse(self, tmp_path):
        def compile_and_read(function, arguments):
            aot.compile_for(aot.mesh("a100"), function, arguments, dump=tmp_path)
            (found,) = aot.resources(tmp_path, "paged").values()
            return found

        return compile_and_read

    def mixed(self, **settings):
        _, arguments, _ = cases.program("triton-mixed", cases.Case(head_dim=128))

        def attention(query, keys, values, query_start, kv_len, block_tables):
            batch = PagedBatch(query_start=query_start, kv_len=kv_len, block_tables=block_tables, decode=False)
            return triton_mixed.attention(query, keys, values, batch, scale=1.0, settings=MixedSettings(**settings))

        return attention, arguments

    def test_a_tile_that_exceeds_the_registers(self, analyse):
        found = analyse(*self.mixed(query_tile=256, key_tile=64, num_warps=4, num_stages=1))
        assert found.spills > 1000
        assert "spill to memory" in kernel_faults(found, limit=aot.shared_limit("a100"), expected={})[0]

    def test_a_tile_that_exceeds_the_shared_memory(self, analyse):
        with pytest.raises(Exception, match="Shared memory size limit exceeded"):
            analyse(*self.mixed(query_tile=16, key_tile=512, num_warps=8, num_stages=4))

    def test_missing_instructions(self, analyse):
        found = analyse(*self.mixed(query_tile=64, key_tile=32, num_warps=4, num_stages=2))
        assert kernel_faults(found, limit=aot.shared_limit("a100"), expected={"copy": COPY, "mma": MMA}) == ()
        faults = kernel_faults(found, limit=1000, expected={"wgmma": WGMMA})
        too_much = f"{found.shared} bytes of shared memory, expected at most 1000 a block"
        assert faults == (too_much, "no wgmma instruction")
