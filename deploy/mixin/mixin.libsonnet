// The rules and dashboards of vramledger as a mixin (https://monitoring.mixins.dev). They are the same that Prometheus
// and Grafana load from alerts/ and dashboards/: thresholds are changed in alerts/thresholds.yml, not here.
local groups = (import '../../alerts/rules.json').groups;
// A group with alerts stays whole: they follow the records that they read.
local alerts(group) = std.length([rule for rule in group.rules if std.objectHas(rule, 'alert')]) > 0;

{
  prometheusRules+:: { groups+: [group for group in groups if !alerts(group)] },
  prometheusAlerts+:: { groups+: [group for group in groups if alerts(group)] },
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
