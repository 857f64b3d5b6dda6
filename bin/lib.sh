# What every command here needs first: sourced, never run.
#
# After `prepare` the machine has the Debian packages of packages.txt, var/venv holds exactly
# requirements.lock, and static/vendor holds what the console serves. Each part is skipped
# when nothing it depends on has changed, so a second run costs well under a second.

set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/var/venv
PYTHON=$VENV/bin/python

# What a caller may set, and so what sudo must let through (see platform/launch/config.py).
SETTABLE=DATABASE_URL,REDIS_URL,S3_ENDPOINT_URL,S3_BUCKET,S3_ACCESS_KEY_ID,S3_SECRET_ACCESS_KEY
SETTABLE+=,S3_REGION,S3_PREFIX,SECRET_KEY,DEBUG,ALLOWED_HOSTS,PUBLIC_URL,WEB_PORT,POSTGRES_PORT
SETTABLE+=,REDIS_PORT,S3_PORT,GATE_PORT,PORT_BASE,HOST_NAME,STATE_DIR,RUN_DIR,GUEST_NETWORK
SETTABLE+=,GUEST_BRIDGE,GUEST_SUBNET,REGION_ID,CLUSTER_KEY,CACHE_BUDGET_BYTES,MAIL_FILE
SETTABLE+=,SANDKEEP_USER,DISK_USER,CI

say() { printf '%s\n' "$*"; }
fail() { printf '%s\n' "$*" >&2; exit 1; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; return; fi
  command -v sudo >/dev/null || fail "This needs root, and there is no sudo: run it as root."
  sudo --preserve-env="$SETTABLE" "$@"
}

# Run a Python module of ours as root; as an ordinary user's, what needs no root runs as them.
launch() {
  if [ "$(id -u)" != 0 ]; then export SANDKEEP_USER=${SANDKEEP_USER:-$(id -un)}; fi
  as_root "$PYTHON" -m "launch.$1" "${@:2}"
}

# Run `launch` in place of this shell, so that signals reach it.
exec_launch() {
  if [ "$(id -u)" = 0 ]; then exec "$PYTHON" -m "launch.$1" "${@:2}"; fi
  launch "$@"
}

timed() {
  local what=$1 started=$SECONDS
  say "· $what …"
  "${@:2}"
  say "✓ $what  $((SECONDS - started)) s"
}

prepare() {
  mkdir -p "$ROOT/var/log"
  # Two commands started at once would otherwise fill the same virtualenv.
  exec 9>"$ROOT/var/prepare.lock"
  flock 9
  need_packages
  need_venv
  need_assets
  flock -u 9
  exec 9>&-
}

need_packages() {
  local missing
  mapfile -t missing < <(missing_packages)
  if [ "${#missing[@]}" = 0 ]; then return; fi
  timed "Debian packages: ${#missing[@]} missing" install_packages "${missing[@]}"
}

missing_packages() {
  local installed line name found
  installed=" $(dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' | sed -n 's/^ii //p' | tr '\n' ' ')"
  while read -r line; do
    line=${line%%#*}; line=${line// /}
    [ -n "$line" ] || continue
    found=
    for name in ${line//|/ }; do
      case $installed in *" $name "*) found=1 ;; esac
    done
    [ -n "$found" ] || say "$line"
  done <"$ROOT/bin/packages.txt"
  # Node may come from elsewhere; Debian's npm brings several hundred packages with it.
  command -v npm >/dev/null || printf 'nodejs\nnpm\n'
}

install_packages() {
  local log=$ROOT/var/log/packages.log policy=/usr/sbin/policy-rc.d kept=
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o Dpkg::Use-Pty=0)
  as_root "${apt[@]}" update >"$log" 2>&1 || { tail -n 20 "$log"; fail "apt-get update failed: $log"; }

  local line name chosen=()
  for line in "$@"; do
    for name in ${line//|/ }; do
      if apt-cache show "$name" >/dev/null 2>&1; then chosen+=("$name"); continue 2; fi
    done
    fail "Debian has none of: $line"
  done
  say "  ${chosen[*]}"

  # We start our own servers on our own ports: keep the packages from starting theirs.
  if [ -e $policy ]; then kept=$policy.sandkeep-kept; as_root mv $policy $kept; fi
  as_root sh -c "printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy"
  local done_well=1
  as_root "${apt[@]}" install --no-install-recommends "${chosen[@]}" >>"$log" 2>&1 || done_well=
  as_root rm -f $policy
  if [ -n "$kept" ]; then as_root mv $kept $policy; fi
  [ -n "$done_well" ] || { tail -n 20 "$log"; fail "apt-get install failed: $log"; }
}

need_venv() {
  local stamp=$VENV/.lock-stamp want
  want=$(cat "$ROOT/requirements.lock" <(readlink -f /usr/bin/python3) <(say "$ROOT") | sha256sum)
  if [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then return; fi
  timed "Python packages into var/venv" fill_venv
  say "$want" >"$stamp"
}

fill_venv() {
  local log=$ROOT/var/log/venv.log
  # The system's Python, not whichever comes first on PATH: nbdkit's Python plugin embeds
  # that one, and imports our packages from this virtualenv.
  if ! { /usr/bin/python3 -m venv "$VENV" &&
    "$PYTHON" -m pip install -q --require-hashes -r "$ROOT/requirements.lock" &&
    "$PYTHON" -m pip install -q --no-deps --no-build-isolation -e "$ROOT"; } >"$log" 2>&1
  then tail -n 20 "$log"; fail "The virtualenv could not be filled: $log"; fi
}

need_assets() {
  local stamp=$ROOT/static/vendor/.lock-stamp want
  want=$(cat "$ROOT/package-lock.json" "$ROOT/bin/lib.sh" | sha256sum)
  if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then return; fi
  timed "Front-end assets into static/vendor" fill_assets
  say "$want" >"$stamp"
}

fill_assets() {
  local log=$ROOT/var/log/assets.log from=$ROOT/node_modules to=$ROOT/static/vendor
  (cd "$ROOT" && npm ci --ignore-scripts --no-audit --no-fund) >"$log" 2>&1 ||
    { tail -n 20 "$log"; fail "npm ci failed: $log"; }

  rm -rf "$to"
  mkdir -p "$to"/{tabler,tabler-icons/fonts,htmx,xterm,uplot,codemirror}
  cp "$from"/@tabler/core/dist/css/{tabler,tabler-themes,tabler-vendors}.min.css "$to/tabler"
  cp "$from"/@tabler/core/dist/js/{tabler,tabler-theme}.min.js "$to/tabler"
  cp "$from"/@tabler/icons-webfont/dist/tabler-icons.min.css "$to/tabler-icons"
  cp "$from"/@tabler/icons-webfont/dist/fonts/tabler-icons.{woff2,woff,ttf} "$to/tabler-icons/fonts"
  cp "$from"/htmx.org/dist/htmx.min.js "$from"/htmx-ext-sse/dist/sse.min.js \
    "$from"/htmx-ext-ws/dist/ws.min.js "$from"/idiomorph/dist/idiomorph-ext.min.js "$to/htmx"
  cp "$from"/@xterm/xterm/lib/xterm.js "$from"/@xterm/xterm/css/xterm.css "$to/xterm"
  cp "$from"/@xterm/addon-{clipboard,fit,search,unicode11,web-links,webgl}/lib/addon-*.js "$to/xterm"
  cp "$from"/uplot/dist/{uPlot.iife.min.js,uPlot.min.css} "$to/uplot"
  cp -r "$from"/codemirror/{lib,mode,addon} "$to/codemirror"
  find "$to/codemirror" -name '*.html' -delete
  # The maps are not copied, and the manifest of static files refuses a link to nothing.
  find "$to" \( -name '*.js' -o -name '*.css' \) -exec \
    sed -i -E 's@/[/*][#\@] sourceMappingURL=[^ *]*( \*/)?@@' {} +
}
