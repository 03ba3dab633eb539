"""Checks what no validator knows about deploy/: that its files agree with attnd and with each other.
manifests.py [FOLDER]

FOLDER holds the output of `kubectl kustomize` for each overlay as NAME.yaml; check.sh writes it. Without FOLDER the
checks of overlays are skipped. The last line is "manifests: N passed, N failed"."""
import glob
import json
import os
import re
import sys

import yaml

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))
DEPLOY = os.path.join(ROOT, 'deploy')
# seconds that the daemon may take after --drain-ms for its last answers: LOOP_STOP_MS and MAIN_STOP_WAIT_MS in
# server/base/limits.h
ANSWERS_S = 3
passed = failed = 0


def check(what, good, detail=''):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print(f'{"ok      " if good else "FAILED  "} {what}' + (f': {detail}' if not good else ''))


def text(path):
    with open(os.path.join(ROOT, path)) as f:
        return f.read()


def documents(path):
    with open(path) as f:
        return [d for d in yaml.safe_load_all(f) if d is not None]


def source_number(path, name):
    return int(re.search(rf'\b{name} = (\d+)', text(path)).group(1))


def drain_ms(environment):
    """Returns for how many milliseconds attnd drains with these environment variables (--drain-ms)."""
    default = int(re.search(r'"drain-ms", "ATTND_DRAIN_MS", TYPE_INT64, "N", AT\(drain_ms\), (\d+)', text('server/base/config_table.c')).group(1))
    return int(environment.get('ATTND_DRAIN_MS', default))


def seconds(duration):
    return int(re.fullmatch(r'(\d+)s', duration).group(1))


def check_names():
    """Checks that all ATTND_ variables and attnd_ metrics which deploy/ mentions exist in attnd."""
    options = set(re.findall(r'"(ATTND_[A-Z_]+)"', text('server/base/config_table.c')))
    flags = set(re.findall(r'^    \{ "([a-z-]+)", "ATTND_', text('server/base/config_table.c'), re.M)) | {'help', 'version'}
    metrics = set(re.findall(r'"(attnd_[a-z_]+)"', text('server/base/metrics.h')))
    # variables of compose.yaml and of the examples that are not options of attnd
    compose_only = {'ATTND_PUBLISH', 'ATTND_URL', 'ATTND_TOKEN'}
    names, unknown, count = {}, [], 0
    for path in ['Dockerfile'] + sorted(glob.glob('deploy/**/*', root_dir=ROOT, recursive=True)):
        if os.path.isfile(os.path.join(ROOT, path)) and not path.endswith('.png'):
            names[path] = text(path)
    for path, content in names.items():
        for name in set(re.findall(r'\bATTND_[A-Z_]+\b', content)):
            count += 1
            # a comment of deployment.yaml warns of variables that Kubernetes itself sets; they are no options
            if name not in options | compose_only | ({'ATTND_PORT', 'ATTND_SERVICE_HOST'} if 'deployment' in path else set()):
                unknown.append(f'{path}: {name}')
        for name in set(re.findall(r'\battnd_[a-z_]+\b', content)) - {'attnd_by_session'}:
            count += 1
            base = re.sub(r'_(bucket|sum|count)$', '', name)
            # In a proxy's configuration, a name with the prefix attnd_ may be a group of servers or a recorded series.
            # In these files only names that look like metrics are checked.
            if name not in metrics and base not in metrics and path.split('/')[1] not in ('nginx', 'envoy'):
                unknown.append(f'{path}: {name}')
    check(f'{count} names of options and metrics in deploy/ exist', not unknown and count > 50, '; '.join(unknown))
    used = set(re.findall(r'(?<![\w-])--([a-z][a-z-]+)', '\n'.join(re.findall(r'attnd .*', text('deploy/README.md')))))
    outside = {'profile', 'target', 'build-arg', 'ipc', 'gpus', 'read-only', 'cap-drop', 'stop-timeout', 'rm', 'publish', 'name', 'shm-size', 'unix-socket', 'network', 'user'}
    check('the options of attnd in deploy/README.md exist', not used - flags - outside, str(used - flags - outside))


def check_yaml():
    for path in sorted(glob.glob('**/*.y*ml', root_dir=DEPLOY, recursive=True)):
        try:
            count = len(documents(os.path.join(DEPLOY, path)))
            check(f'{path} is YAML', count > 0, 'empty')
        except yaml.YAMLError as e:
            check(f'{path} is YAML', False, e)
    for path in sorted(glob.glob('**/*.json', root_dir=DEPLOY, recursive=True)):
        try:
            json.loads(text('deploy/' + path))
            check(f'{path} is JSON', True)
        except ValueError as e:
            check(f'{path} is JSON', False, e)


def check_drain_constants():
    answers, devices = (source_number('server/base/limits.h', name) for name in ('LOOP_STOP_MS', 'MAIN_STOP_WAIT_MS'))
    check(f'the last answers take at most {ANSWERS_S} s, as deploy/ says', answers + devices == 1000 * ANSWERS_S, f'{answers} + {devices} ms')


def check_compose():
    compose = documents(os.path.join(DEPLOY, 'compose.yaml'))[0]
    for name in ('attnd-cpu', 'attnd-gpu'):
        service = compose['services'][name]
        need = drain_ms(service['environment']) / 1000 + ANSWERS_S
        check(f'compose.yaml {name}: stop_grace_period is above {need:g} s', seconds(service['stop_grace_period']) > need)
        check(f'compose.yaml {name}: read-only, without capabilities', service['read_only'] is True and service['cap_drop'] == ['ALL'])
    missing = []
    for name, service in compose['services'].items():
        for volume in service.get('volumes', []):
            source = volume.split(':')[0]
            if source.startswith('.') and not os.path.exists(os.path.join(DEPLOY, source)):
                missing.append(f'{name}: {source}')
    check('compose.yaml: every mounted file is there', not missing, '; '.join(missing))
    targets = [t for job in documents(os.path.join(DEPLOY, 'prometheus/prometheus.yml'))[0]['scrape_configs']
               for static in job['static_configs'] for t in static['targets']]
    aliases = {a for s in compose['services'].values() for a in (s.get('networks') or {}).get('default', {}).get('aliases', [])}
    unknown = [t for t in targets if t.split(':')[0] not in aliases | set(compose['services']) | {'localhost'}]
    check('prometheus.yml: every target is a service of compose.yaml', not unknown, '; '.join(unknown))


def check_overlay(name, docs):
    by_kind = {}
    for d in docs:
        by_kind.setdefault(d['kind'], []).append(d)
    deployment = by_kind['Deployment'][0]
    spec = deployment['spec']['template']['spec']
    container = spec['containers'][0]
    labels = deployment['spec']['template']['metadata']['labels']
    selectors = [deployment['spec']['selector']['matchLabels'], by_kind['PodDisruptionBudget'][0]['spec']['selector']['matchLabels'],
                 by_kind['NetworkPolicy'][0]['spec']['podSelector']['matchLabels']]
    selectors += [s['spec']['selector'] for s in by_kind['Service']]
    selectors += [m['spec']['selector']['matchLabels'] for m in by_kind.get('PodMonitor', [])]
    selectors += [c['labelSelector']['matchLabels'] for c in spec['topologySpreadConstraints']]
    check(f'{name}: all {len(selectors)} selectors find the pods', all(s and s.items() <= labels.items() for s in selectors), selectors)
    clients = by_kind['NetworkPolicy'][0]['spec']['ingress'][0]['from'][0]['podSelector']['matchLabels']
    check(f'{name}: the clients of the NetworkPolicy need not be attnd', not clients.items() & labels.items(), clients)

    config = {d['metadata']['name']: d['data'] for d in by_kind['ConfigMap']}
    environment = config[container['envFrom'][0]['configMapRef']['name']]
    pre_stop = container['lifecycle']['preStop']['sleep']['seconds']
    need = pre_stop + drain_ms(environment) / 1000 + ANSWERS_S
    check(f'{name}: terminationGracePeriodSeconds is above {need:g}', spec['terminationGracePeriodSeconds'] > need)

    ports = {p['name']: p['containerPort'] for p in container['ports']}
    listens = {int(environment[v].rsplit(':', 1)[1]) for v in ('ATTND_LISTEN', 'ATTND_METRICS_LISTEN')}
    named = [s['spec']['ports'][0]['targetPort'] for s in by_kind['Service']]
    named += [container[p]['httpGet']['port'] for p in ('startupProbe', 'livenessProbe', 'readinessProbe')]
    named += [e['port'] for m in by_kind.get('PodMonitor', []) for e in m['spec']['podMetricsEndpoints']]
    named += [p['port'] for rule in by_kind['NetworkPolicy'][0]['spec']['ingress'] for p in rule['ports']]
    check(f'{name}: attnd listens on its ports, and all {len(named)} uses of a port name one', set(ports.values()) == listens and set(named) <= set(ports))
    routes = text('server/routes/routes.c')
    paths = {container[p]['httpGet']['path'] for p in ('startupProbe', 'livenessProbe', 'readinessProbe')}
    check(f'{name}: its probes are routes', all(f'"{p}"' in routes for p in paths), paths)

    security = container['securityContext']
    check(f'{name}: restricted', spec['securityContext']['runAsNonRoot'] and spec['securityContext']['runAsUser'] == 10001 and
          spec['securityContext']['seccompProfile']['type'] == 'RuntimeDefault' and security['readOnlyRootFilesystem'] and
          security['allowPrivilegeEscalation'] is False and security['capabilities']['drop'] == ['ALL'])
    gpus = {k: v for k, v in container.get('resources', {}).get('limits', {}).items() if k.startswith('nvidia.com/')}
    want = {'cpu': {}, 'keda': {}, 'gpu': {'nvidia.com/gpu': 1}, 'multi-gpu': {'nvidia.com/gpu': 4}, 'mig': {'nvidia.com/mig-1g.18gb': 1}}[name]
    check(f'{name}: its GPUs', gpus == want, gpus)
    scaled = by_kind.get('HorizontalPodAutoscaler', []) + by_kind.get('ScaledObject', [])
    check(f'{name}: one thing scales it', len(scaled) == 1 and scaled[0]['spec']['scaleTargetRef']['name'] == deployment['metadata']['name'])


def check_kserve():
    runtime = documents(os.path.join(DEPLOY, 'kserve/runtime.yaml'))[0]
    service = documents(os.path.join(DEPLOY, 'kserve/inferenceservice.yaml'))[0]
    formats = {(f['name'], f['version']) for f in runtime['spec']['supportedModelFormats']}
    model, predictor = service['spec']['predictor']['model'], service['spec']['predictor']
    check('kserve: the service names the runtime and one of its formats',
          model['runtime'] == runtime['metadata']['name'] and (model['modelFormat']['name'], model['modelFormat']['version']) in formats)
    container = runtime['spec']['containers'][0]
    environment = {e['name']: e['value'] for e in container['env']}
    check('kserve: the container has the name that KServe looks for', container['name'] == 'kserve-container')
    check('kserve: the grace period is above the drain', predictor['terminationGracePeriodSeconds'] > drain_ms(environment) / 1000 + ANSWERS_S)
    routes = text('server/routes/routes.c')
    check('kserve: its probes are routes', all(f'"{container[p]["httpGet"]["path"]}"' in routes for p in ('readinessProbe', 'livenessProbe')))


def check_systemd():
    unit, environment = text('deploy/systemd/attnd.service'), text('deploy/systemd/attnd.env')
    values = dict(re.findall(r'^(ATTND_\w+)=(.*)$', environment, re.M))
    timeout = int(re.search(r'^TimeoutStopSec=(\d+)$', unit, re.M).group(1))
    check('systemd: TimeoutStopSec is above the drain', timeout > drain_ms(values) / 1000 + ANSWERS_S)
    statuses = set(re.search(r'^RestartPreventExitStatus=(.*)$', unit, re.M).group(1).split())
    documented = {s for s in ('64', '69', '78') if re.search(rf'\b{s}\b', text('server/main.c').split('*/')[0])}
    check('systemd: the statuses that forbid a restart are those of server/main.c', statuses == documented)


def check_links():
    broken, count = [], 0
    for target in re.findall(r'\]\(([^)#]+)(?:#[^)]*)?\)', text('deploy/README.md')):
        if '://' in target:
            continue
        count += 1
        if not os.path.exists(os.path.join(DEPLOY, target)):
            broken.append(target)
    check(f'{count} links of deploy/README.md lead somewhere', count > 5 and not broken, '; '.join(broken))


def main():
    check_yaml()
    check_names()
    check_drain_constants()
    check_compose()
    for path in sorted(glob.glob(os.path.join(sys.argv[1], '*.yaml'))) if len(sys.argv) > 1 else []:
        check_overlay(os.path.splitext(os.path.basename(path))[0], documents(path))
    check_kserve()
    check_systemd()
    check_links()
    print(f'manifests: {passed} passed, {failed} failed')
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
