#!/usr/bin/env bash
# Checks every file of deploy/, and the Dockerfile, with the tool that will read it: tests/deploy/check.sh.
# `make check-deploy` runs this script.
#
# A missing tool is installed if that takes seconds (Debian packages as root, PyPI packages into build/deploy-venv). A
# tool that cannot be installed is skipped, and its name is printed. CHECK_INSTALL=0 installs nothing.
# The last line is "N passed, N failed, N skipped"; the exit status is 0 when nothing failed.
#
#   Dockerfile            hadolint (PyPI); its version is the Makefile's
#   compose.yaml          docker compose config, or Debian's docker-compose, for each profile
#   k8s/                  kubectl kustomize for each overlay; kubernetes-validate (PyPI), which has the schemas
#   systemd/              systemd-analyze verify and security
#   prometheus/           promtool check config, check rules, test rules
#   nginx/, envoy/        nginx -t; envoy --mode validate (PyPI)
#   all of deploy/        manifests.py: what no tool checks, such as option and metric names, selectors, drain times
#   README.md             every block marked `sh` is run, in order and unchanged; no link may be broken
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
top=$PWD
here=tests/deploy
work=build/check-deploy
venv=build/deploy-venv
rm -rf "$work"
mkdir -p "$work"
passed=0 failed=0 skipped=0
PATH=$PATH:/usr/sbin:/sbin:$top/build/tools/usr/sbin:$top/build/tools/usr/bin

check() { # check NAME COMMAND...: runs the command. Prints nothing if it passes, and all of its output if it fails.
    local what=$1
    shift
    if "$@" >"$work/output" 2>&1; then passed=$((passed + 1)) && echo "ok       $what"; else
        failed=$((failed + 1)) && echo "FAILED   $what" && sed 's/^/         /' "$work/output"
    fi
}
skip() { skipped=$((skipped + 1)) && echo "skipped  $1"; }
have() { command -v "$1" >/dev/null; }

# ---- Tools -----------------------------------------------------------------------------------------------------------

if [ "${CHECK_INSTALL:-1}" = 1 ]; then
    packages=()
    docker compose version >/dev/null 2>&1 || have docker-compose || packages+=(docker-compose)
    have nginx || packages+=(nginx-light)
    have shellcheck || packages+=(shellcheck)
    have wrk || packages+=(wrk)
    have curl || packages+=(curl)
    have openssl || packages+=(openssl)
    if [ ${#packages[@]} -gt 0 ] && have apt-get && [ "$(id -u)" = 0 ]; then
        echo "Installing what is missing: ${packages[*]}"
        # While this policy file exists, a package such as NGINX starts no server when it is installed.
        policy=/usr/sbin/policy-rc.d
        [ -e $policy ] && policy= || { printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy; }
        { apt-get update -q; DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"; } >"$work/apt.log" 2>&1 ||
            echo "(not all of them: $work/apt.log)"
        [ -z "$policy" ] || rm -f $policy
    fi
    if ! cmp -s $here/requirements.txt $venv/requirements.txt; then
        echo "Fetching from PyPI into $venv: $(grep -v '^#' $here/requirements.txt | paste -sd ' ')"
        rm -rf $venv
        { python3 -m venv $venv && $venv/bin/pip install -q --disable-pip-version-check --retries 1 -r $here/requirements.txt &&
            cp $here/requirements.txt $venv/; } >build/deploy-venv.log 2>&1 || echo "(not all of them: build/deploy-venv.log)"
    fi
fi
[ -d $venv/bin ] && PATH=$top/$venv/bin:$PATH
python=$(for p in "$top/$venv/bin/python3" python3 /usr/bin/python3; do "$p" -c 'import yaml' 2>/dev/null && echo "$p" && break; done)

# ---- The image -------------------------------------------------------------------------------------------------------

if have hadolint; then check "Dockerfile: hadolint" hadolint Dockerfile; else skip "Dockerfile: no hadolint"; fi
same_version() { [ "$(sed -n 's/^ARG VERSION=//p' Dockerfile)" = "$(sed -n 's/^VERSION := //p' Makefile)" ]; }
check "Dockerfile: its version is the Makefile's" same_version
if have shellcheck; then check "tests/deploy/*.sh: shellcheck" shellcheck -S warning $here/*.sh; else skip "tests/deploy/*.sh: no shellcheck"; fi

# ---- Compose ---------------------------------------------------------------------------------------------------------

compose=
if docker compose version >/dev/null 2>&1; then compose='docker compose'; elif have docker-compose; then compose=docker-compose; fi
for profile in cpu gpu observability; do
    if [ -n "$compose" ]; then check "compose.yaml: $compose --profile $profile config" $compose -f deploy/compose.yaml --profile $profile config -q
    else skip "compose.yaml, profile $profile: no docker compose, no docker-compose"; fi
done

# ---- Kubernetes ------------------------------------------------------------------------------------------------------

overlays='cpu gpu multi-gpu mig'
# Users get KEDA's variant by changing one line of an overlay; this script makes the same change to a copy.
mkdir -p $work/keda
cat >$work/keda/kustomization.yaml <<'END'
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../../../deploy/k8s/base]
components: [../../../deploy/k8s/components/keda]
END
render() { kubectl kustomize "$1" >"$2" && [ -s "$2" ]; }
if have kubectl && kubectl kustomize --help >/dev/null 2>&1; then
    for overlay in $overlays; do check "k8s/overlays/$overlay: kubectl kustomize" render deploy/k8s/overlays/$overlay $work/$overlay.yaml; done
    check "k8s/components/keda: kubectl kustomize" render $work/keda $work/keda.yaml
else skip "k8s: no kubectl"; fi
# kubernetes-validate knows all members of Kubernetes' own types. For other types (PodMonitor, ScaledObject, KServe's
# types) it has no schema, and says so in its output.
validate() {
    kubernetes-validate --strict "$1" 2>&1 | tee "$work/validate" && ! grep -q '^ERROR' "$work/validate" && grep -q 'passed' "$work/validate"
}
for rendered in $work/*.yaml; do
    [ -e "$rendered" ] || continue
    name=$(basename "$rendered" .yaml)
    if have kubernetes-validate; then
        check "k8s $name: kubernetes-validate --strict" validate "$rendered"
        grep -o "Couldn't find schema for kind [A-Za-z]*" $work/output | sed 's/^.* //' >>$work/unknown
    else skip "k8s $name: no kubernetes-validate"; fi
done
for kind in $(sort -u $work/unknown 2>/dev/null); do skip "k8s: $kind has no schema in kubernetes-validate (it is rendered, and manifests.py reads it)"; done
skip "kserve/: KServe's types have no schema in kubernetes-validate (manifests.py reads them)"

# ---- systemd ---------------------------------------------------------------------------------------------------------

# The unit file names attnd, which may not be installed here, so a program that exists replaces it. systemd only warns
# about unknown settings, so any output counts as a failure.
unit() {
    mkdir -p $work/unit && sed 's,^ExecStart=/usr/local/bin/attnd,ExecStart=/bin/true,' deploy/systemd/attnd.service >$work/unit/attnd.service &&
        systemd-analyze verify --recursive-errors=no --man=no $work/unit/attnd.service >$work/verify 2>&1
    local status=$?
    cat $work/verify
    [ $status = 0 ] && [ ! -s $work/verify ]
}
if have systemd-analyze; then
    check "systemd/attnd.service: systemd-analyze verify" unit
    check "systemd/attnd.service: systemd-analyze security, exposure at most 2.5 of 10" systemd-analyze security --no-pager --offline=true --threshold=25 $work/unit/attnd.service
else skip "systemd/attnd.service: no systemd-analyze"; fi

# ---- Prometheus, proxies ---------------------------------------------------------------------------------------------

if have promtool; then
    check "prometheus/prometheus.yml: promtool check config" promtool check config deploy/prometheus/prometheus.yml
    check "prometheus/alerts.yml: promtool check rules" promtool check rules deploy/prometheus/alerts.yml
    check "prometheus/alerts_test.yml: promtool test rules" promtool test rules deploy/prometheus/alerts_test.yml
else skip "prometheus/: no promtool"; fi

# NGINX must resolve the names of its servers when it starts, so here 127.0.0.1 replaces them. NGINX writes into a
# folder of this script.
nginx_test() {
    mkdir -p $work/nginx && sed -E 's/\battnd-[0-9]+:/127.0.0.1:/' "$1" >$work/nginx/attnd.conf &&
        printf 'pid %s/nginx.pid; error_log stderr; events {} http { access_log off; include %s; %s }\n' "$top/$work/nginx" "$top/$work/nginx/attnd.conf" \
            "$(for t in client_body proxy fastcgi uwsgi scgi; do printf '%s_temp_path %s/%s; ' $t "$top/$work/nginx" $t; done)" >$work/nginx/nginx.conf &&
        nginx -t -e stderr -c "$top/$work/nginx/nginx.conf"
}
for conf in deploy/nginx/*.conf; do
    if have nginx; then check "${conf#deploy/}: nginx -t" nginx_test "$conf"; else skip "${conf#deploy/}: no nginx"; fi
done
for conf in deploy/envoy/*.yaml; do
    if have envoy; then check "${conf#deploy/}: envoy --mode validate" envoy --mode validate -l warn -c "$conf"; else skip "${conf#deploy/}: no envoy"; fi
done

# ---- What no tool knows ----------------------------------------------------------------------------------------------

if [ -n "$python" ]; then
    "$python" $here/manifests.py $work | tee $work/manifests
    read -r p f < <(sed -n 's/^manifests: \([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' $work/manifests)
    passed=$((passed + ${p:-0})) failed=$((failed + ${f:-1}))
else skip "manifests.py: no Python with yaml"; fi

export ATTND_BINARY=${ATTND_BINARY:-$top/build/attnd}
if [ -x "$ATTND_BINARY" ] && have wrk; then check "README.md: every block marked sh, run from the top" bash $here/readme.sh
else skip "README.md: its blocks want build/attnd (make) and wrk"; fi

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
