// The rules and dashboards of vramledger as a mixin (https://monitoring.mixins.dev). They are the same that Prometheus
// and Grafana load from alerts/ and dashboards/: thresholds are changed in alerts/thresholds.yml, not here.
local groups = (import '../../alerts/rules.json').groups;
local kept(key) = [
  group { rules: [rule for rule in group.rules if std.objectHas(rule, key)] }
  for group in groups
  if std.length([rule for rule in group.rules if std.objectHas(rule, key)]) > 0
];

{
  prometheusRules+:: { groups+: kept('record') },
  prometheusAlerts+:: { groups+: kept('alert') },
  grafanaDashboardFolder:: 'vramledger',
  grafanaDashboards+:: {
    'vramledger-device.json': (import '../../dashboards/device.json'),
    'vramledger-exporter.json': (import '../../dashboards/exporter.json'),
    'vramledger-fleet.json': (import '../../dashboards/fleet.json'),
    'vramledger-framework.json': (import '../../dashboards/framework.json'),
    'vramledger-node.json': (import '../../dashboards/node.json'),
    'vramledger-owner.json': (import '../../dashboards/owner.json'),
    'vramledger-process.json': (import '../../dashboards/process.json'),
  },
}
