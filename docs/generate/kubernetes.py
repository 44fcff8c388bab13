"""The table of docs/launch-kubernetes.md: what a cluster needs, and where each part comes from."""

from shardyard.launchers.kubernetes.prerequisites import ALL, ETCD


def table() -> str:
    """A Markdown table: a row a part."""
    lines = ["| part | version | from | by | read on |", "|---|---|---|---|---|"]
    for part in ALL:
        release = part.release
        if release is None:
            origin = "rendered by us" if part is ETCD else "its vendor"
            lines.append(f"| {part.name} | {part.version} | {origin} | | |")
        else:
            tool = {"chart": "helm", "addon": "eksctl"}.get(release.method, "kubectl")
            lines.append(
                f"| {part.name} | {part.version} | `{release.url}` | {tool} | {release.read_on} |"
            )
    return "\n".join(lines) + "\n"
