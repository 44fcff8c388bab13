"""Memory of CUDA devices grows in segments."""

from shardyard.config.allocator import let_memory_grow
from shardyard.config.schema.recipe import Cluster, Recipe


def test_memory_of_cuda_grows_in_segments_unless_somebody_said_otherwise() -> None:
    cuda = Recipe(cluster=Cluster(device="cuda"))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        said = {name: "max_split_size_mb:64"}
        let_memory_grow(cuda, said)
        assert said == {name: "max_split_size_mb:64"}
    quiet: dict[str, str] = {}
    let_memory_grow(Recipe(cluster=Cluster(device="cpu")), quiet)
    assert not quiet
    let_memory_grow(cuda, quiet)
    assert quiet == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
