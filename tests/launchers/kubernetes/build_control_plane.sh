#!/usr/bin/env bash
# Build Kubernetes' API server, controller manager and scheduler from Debian's source package.
#
#   build_control_plane.sh [FOLDER]      binaries in FOLDER/bin; default ~/.cache/shardyard-tests/kube
#
# Version 1.20.2 of bookworm is the newest that Debian has whole. Compiler: Go 1.19 of bookworm. Both
# come from the Debian mirror that apt is set up with; nothing is installed but rsync, jq and gcc,
# which the build calls. What is there already is not built again: delete FOLDER to begin anew.
set -euo pipefail

to=$(realpath -m "${1:-${XDG_CACHE_HOME:-$HOME/.cache}/shardyard-tests/kube}")
programs=(kube-apiserver kube-controller-manager kube-scheduler)
mkdir -p "$to/bin" "$to/home" "$to/apt/lists/partial" "$to/apt/cache/archives/partial"

is_built() { for each in "${programs[@]}"; do [ -x "$to/bin/$each" ] || return 1; done; }
if is_built; then
  echo "in $to/bin already: ${programs[*]}"
  exit 0
fi

need=()
for tool in rsync jq make gcc dpkg-source; do
  command -v "$tool" >/dev/null || need+=("${tool/dpkg-source/dpkg-dev}")
done
if [ ${#need[@]} -gt 0 ]; then
  apt-get --quiet update >"$to/apt.log" 2>&1
  apt-get --quiet install --yes --no-install-recommends "${need[@]}" >>"$to/apt.log" 2>&1
fi

# The mirror and its key, as apt has them on this machine; bookworm's lists are kept apart.
sources=$(cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true)
mirror=$(grep -oE 'https?://[^] ]+/debian/?( |$)' <<<"$sources" | head -1 | tr -d ' ')
key=$(grep -oE '/[^] ]*debian-archive-keyring\.[a-z]+' <<<"$sources" | head -1 || true)
[ -n "$mirror" ] || { echo "error: apt has no Debian mirror, which the sources come from" >&2; exit 1; }
printf 'Types: deb deb-src\nURIs: %s\nSuites: bookworm\nComponents: main\nSigned-By: %s\n' \
  "$mirror" "${key:-/usr/share/keyrings/debian-archive-keyring.gpg}" >"$to/apt/bookworm.sources"
: >"$to/apt/status"
apt_bookworm() {
  apt-get --quiet -o APT::Sandbox::User=root -o Dir::Etc::sourcelist="$to/apt/bookworm.sources" \
    -o Dir::Etc::sourceparts=- -o Dir::State::lists="$to/apt/lists" -o Dir::State::status="$to/apt/status" \
    -o Dir::Cache="$to/apt/cache" "$@" >>"$to/apt.log" 2>&1
}

mkdir -p "$to/source" "$to/go"
cd "$to/source"
apt_bookworm update
apt_bookworm source --download-only kubernetes
apt_bookworm download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev
for package in *.deb; do dpkg-deb -x "$package" "$to/go"; done
rm -rf kubernetes-1.20.2
tar xzf kubernetes_*.orig.tar.gz
cd kubernetes-1.20.2
# Its reflect2 1.0.1 crashes in programs of Go 1.18 and newer; 1.0.2 does not.
rm -rf vendor/github.com/modern-go/reflect2
cp -r "$to/go/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/
rm -f vendor/github.com/modern-go/reflect2/go.mod
echo "builds ${programs[*]} (log: $to/build.log)"
# GOFLAGS has to be empty: hack/lib/golang.sh takes it for a list of build tags.
env -u GOROOT -u GOPATH GOFLAGS= GOPROXY=off CGO_ENABLED=0 HOME="$to/home" \
  PATH="$to/go/usr/lib/go-1.19/bin:$PATH" \
  make all WHAT="${programs[*]/#/cmd/}" GOLDFLAGS="-s -w" >"$to/build.log" 2>&1 \
  || { tail -20 "$to/build.log" >&2; exit 1; }
for each in "${programs[@]}"; do cp "_output/local/bin/linux/amd64/$each" "$to/bin/"; done
cd "$to" && rm -rf source go home
echo "built into $to/bin"
