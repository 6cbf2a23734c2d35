"""A process of test_orbax with several virtual devices: convert for a mesh, or restore onto one and compare.

python -m tests.checkpoints.orbax_mesh save SOURCE OUT DEVICES
python -m tests.checkpoints.orbax_mesh restore SOURCE ORBAX DEVICES    print "equal", and the bytes one device holds
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from checkpoints.orbax import OrbaxWeights
from checkpoints.orbax_convert import to_orbax
from checkpoints.reader import Checkpoint


def main() -> None:
    command, source, out, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", count)
    assert len(jax.devices()) == count
    if command == "save":
        to_orbax(source, out, devices=count)
        return
    mesh = Mesh(np.array(jax.devices()), ("model",), axis_types=(AxisType.Auto,))
    expected, found = Checkpoint(source), OrbaxWeights(out + "/orbax")
    held = 0
    assert expected.tensors.keys() == found.tensors.keys()
    for name, info in found.tensors.items():
        for axes in ((), ("model",), (None, "model")):
            if len(axes) > len(info.shape) or any(a and n % count for a, n in zip(axes, info.shape, strict=False)):
                continue
            sharding = NamedSharding(mesh, PartitionSpec(*axes))
            array = found.restore(name, sharding)
            assert array.sharding == sharding, (name, array.sharding)
            assert array.dtype == expected.tensors[name].dtype
            for shard in array.addressable_shards:
                part = np.asarray(shard.data)
                assert part.tobytes() == expected.read(name)[shard.index].tobytes(), name
            if axes == ("model",):
                held += array.addressable_shards[0].data.nbytes
    print(json.dumps({"equal": True, "held": held}))  # noqa: T201


if __name__ == "__main__":
    main()
