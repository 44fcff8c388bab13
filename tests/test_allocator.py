"""Memory of CUDA devices grows in segments."""

from shardyard.foreign_variables import enable_expandable_segments


def test_memory_of_cuda_grows_in_segments_unless_somebody_said_otherwise() -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        said = {name: "max_split_size_mb:64"}
        enable_expandable_segments("cuda", said)
        assert said == {name: "max_split_size_mb:64"}
    quiet: dict[str, str] = {}
    enable_expandable_segments("cpu", quiet)
    assert not quiet
    enable_expandable_segments("cuda", quiet)
    assert quiet == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
