"""The site's search, in a real browser: questions as people type them lead to the right page."""

import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from docs.site.__main__ import FOLDER
from tests.debian_packages import need

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
QUESTIONS = {
    "fine-tune llama on my own data": ("chat", "tutorials/llama2-on-eks", "get-started"),
    "out of memory": ("troubleshooting", "verbs/plan"),
    "resume training from checkpoint": ("verbs/resume",),
    "NCCL environment variables": ("variables",),
    "migrate from DeepSpeed": ("verbs/import", "from-ddp"),
    "early stopping": ("verbs/train", "glossary"),
    "validation loss": ("verbs/train", "verbs/prepare", "glossary"),
    "gradient accumulation": ("numerics", "verbs/train", "glossary"),
    "spot instances": ("launch", "verbs/cluster", "glossary"),
    "multi-node slurm": ("launch-slurm",),
    "wandb": ("exporters",),
    "loss is nan": ("troubleshooting", "numerics"),
    "training hangs": ("hangs", "troubleshooting"),
    "LoRA": ("verbs/train", "chat"),
    "export to hugging face": ("verbs/export",),
    "mixed precision bf16 fp8": ("numerics",),
    "tensor parallelism": ("sharding", "library"),
    "EKS cluster create": ("verbs/cluster", "tutorials/llama2-on-eks"),
    "exit code 143": ("verbs", "troubleshooting", "errors", "launch"),
    "hf token secret": ("secrets",),
    "add special tokens": ("model-folders", "chat"),
}
"""Question -> pages below docs/, any of which answers it."""
FOUND_AT_LEAST = 19
BROWSER = (
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-port=0",  # else it leaves as soon as the page is loaded
)  # fmt: skip

OPEN_ROOTS = """<script>
const attach = Element.prototype.attachShadow, roots = [];
Element.prototype.attachShadow = function (options) {
  roots.push(attach.call(this, {...options, mode: "open"}));
  return roots.at(-1);
};
</script>"""
"""The search keeps its field and answers in a closed shadow root."""
ASK = """<script>
addEventListener("load", async () => {
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const find = (words) => roots.flatMap((root) => [...root.querySelectorAll(words)]);
  const until = async (get, ms) => {
    const end = Date.now() + ms;
    while (!get() && Date.now() < end) await pause(50);
    return get();
  };
  await until(() => document.querySelector(".md-search__button"), 10000);
  document.querySelector(".md-search__button").click();
  const field = await until(() => find("input").find((each) => each.type !== "checkbox"), 10000);
  const links = () => find("a[href]").map((each) => each.getAttribute("href"));
  const answers = {};
  for (const question of QUESTIONS) {
    field.value = "";
    field.dispatchEvent(new Event("input", {bubbles: true}));
    await until(() => !links().length, 3000);
    field.value = question;
    field.dispatchEvent(new Event("input", {bubbles: true}));
    await until(() => links().length, 5000);
    await pause(300);
    answers[question] = links();
  }
  await fetch("/answers", {method: "POST", body: JSON.stringify(answers)});
});
</script>"""


@pytest.fixture(scope="module")
def site() -> Path:
    generator = Path(sys.executable).with_name("zensical")
    if not generator.exists():
        pytest.skip("make site installs the generator")
    subprocess.run([sys.executable, "-m", "docs.site"], cwd=ROOT, check=True, capture_output=True)
    return FOLDER / "html"


@pytest.fixture
def answers(site: Path) -> Iterator[dict[str, list[str]]]:
    """Links that the search shows for each question, best first."""
    need("chromium")
    start = (site / "index.html").read_text().replace("<head>", f"<head>{OPEN_ROOTS}", 1)
    asks = ASK.replace("QUESTIONS", json.dumps(list(QUESTIONS)))
    page = start.replace("</body>", f"{asks}</body>").encode()
    received: list[dict[str, list[str]]] = []
    is_over = threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(site))

        def do_GET(self) -> None:
            if self.path != "/ask.html":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page)
            return None

        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            is_over.set()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/ask.html"
        browser = subprocess.Popen(
            [*BROWSER, f"--user-data-dir={profile}", url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert is_over.wait(180), "the browser sent no answers"
        finally:
            browser.terminate()
            browser.wait(20)
            server.shutdown()
    yield received[0]


def test_questions_find_their_page_among_the_first_three(answers: dict[str, list[str]]) -> None:
    missed = {}
    for question, right in QUESTIONS.items():
        links = (re.sub(r"^https?://[^/]+/", "", link) for link in answers[question])
        pages = list(dict.fromkeys(link.partition("#")[0].partition("?")[0] for link in links))
        if not {f"docs/{page}.html" for page in right} & set(pages[:3]):
            missed[question] = pages[:3]
    assert len(QUESTIONS) - len(missed) >= FOUND_AT_LEAST, missed
