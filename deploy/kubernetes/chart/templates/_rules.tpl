{{- /* The rules with thresholds of one's own, as 'vramledger rules --thresholds FILE' writes them: tests compare both. */}}

{{- define "vramledger.quantity" -}}
{{- /* A threshold in base units: 10GiB in bytes, 1h in seconds. */}}
{{- $text := toString .value }}
{{- if eq $text "never" }}never
{{- else if regexMatch "^[0-9]+(\\.[0-9]+)?(e[+-]?[0-9]+)?([smhd]|[KMGT]iB)?$" $text }}
{{- $unit := regexFind "([smhd]|[KMGT]iB)$" $text }}
{{- $times := get (dict "" 1 "s" 1 "m" 60 "h" 3600 "d" 86400 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776) $unit }}
{{- $number := mulf (float64 (trimSuffix $unit $text)) (float64 $times) }}
{{- if eq $number (floor $number) }}{{ printf "%.0f" $number }}{{ else }}{{ $number }}{{ end }}
{{- else }}
{{- fail (printf "prometheusRule.thresholds: %s: '%s' is not a threshold; write a number, a size (10GiB), a duration (30m, 1h) or never" .key $text) }}
{{- end }}
{{- end }}

{{- define "vramledger.quotable" -}}
{{- . | toString | replace "\\" "\\\\" | replace "\"" "\\\"" | replace "\n" "\\n" }}
{{- end }}

{{- define "vramledger.known" -}}
{{- /* Refuse what is not among the known keys. */}}
{{- if not (kindIs "map" .given) }}{{ fail (printf "prometheusRule.thresholds: %shas no keys; write KEY: VALUE" .place) }}{{ end }}
{{- range $key, $_ := .given }}
{{- if not (has $key $.known) }}{{ fail (printf "prometheusRule.thresholds: %s%s: no such key; 'vramledger rules --defaults' has every key" $.place $key) }}{{ end }}
{{- end }}
{{- end }}

{{- define "vramledger.settings" -}}
{{- /* The values of the names in rules, and the owners with values of their own, as JSON. */}}
{{- $default := fromYaml (.Files.Get "alerts/thresholds.yml") }}
{{- $own := .Values.prometheusRule.thresholds }}
{{- if kindIs "string" $own }}
{{- $own = fromYaml $own }}
{{- with $own.Error }}{{ fail (printf "prometheusRule.thresholds: it is not YAML: %s" .) }}{{ end }}
{{- end }}
{{- include "vramledger.known" (dict "given" $own "known" (keys $default) "place" "") }}
{{- range list "runbooks" "grafana" "pages" }}
{{- if hasKey $own . }}{{ fail (printf "prometheusRule.thresholds: %s: in the chart this is the value prometheusRule.%s" . .) }}{{ end }}
{{- end }}
{{- range list "alert_prefix" "selector" }}
{{- if get $own . }}{{ fail (printf "prometheusRule.thresholds: %s: the chart cannot set it; apply what 'vramledger rules' writes instead" .) }}{{ end }}
{{- end }}
{{- range list "defaults" "severities" }}
{{- include "vramledger.known" (dict "given" (get $own . | default dict) "known" (keys (get $default .)) "place" (printf "%s: " .)) }}
{{- end }}
{{- $names := dict }}
{{- range $name, $value := mergeOverwrite (deepCopy $default.defaults) ($own.defaults | default dict) }}
{{- $number := include "vramledger.quantity" (dict "value" $value "key" (printf "defaults: %s" $name)) }}
{{- if eq $number "never" }}{{ fail (printf "prometheusRule.thresholds: defaults: %s: never is for an owner" $name) }}{{ end }}
{{- $_ := set $names $name $number }}
{{- end }}
{{- $given := list }}
{{- range $own.owners }}{{ $given = append $given .name }}{{ end }}
{{- $entries := $own.owners | default list }}
{{- range $default.owners }}{{ if not (has .name $given) }}{{ $entries = append $entries . }}{{ end }}{{ end }}
{{- $owners := list }}
{{- range $entries }}
{{- $place := printf "owners: %s: " (toString .name) }}
{{- include "vramledger.known" (dict "given" . "known" (concat (list "name" "match") (keys $default.defaults)) "place" $place) }}
{{- include "vramledger.known" (dict "given" (.match | default dict) "known" (list "owner" "owner_type" "user" "namespace" "command" "framework" "policy" "notebook") "place" (printf "%smatch: " $place)) }}
{{- if ne (len (.match | default dict)) 1 }}{{ fail (printf "prometheusRule.thresholds: %smatch: give one label" $place) }}{{ end }}
{{- $label := first (keys .match) }}
{{- $numbers := dict }}
{{- range $name, $value := omit . "name" "match" }}
{{- $_ := set $numbers $name (include "vramledger.quantity" (dict "value" $value "key" (printf "%s%s" $place $name))) }}
{{- if and (has $label (list "command" "framework" "policy" "notebook")) (not (regexMatch "^(growth|hung)_" $name)) }}
{{- fail (printf "prometheusRule.thresholds: %s%s: every program chooses its own %s; match on one of owner, owner_type, user, namespace" $place $name $label) }}
{{- end }}
{{- end }}
{{- $owners = append $owners (dict "label" $label "pattern" (include "vramledger.quotable" (get .match $label)) "thresholds" $numbers) }}
{{- end }}
{{- range $name, $number := deepCopy $names }}
{{- $least := $number }}
{{- range $owners }}
{{- with get .thresholds $name }}{{ if ne . "never" }}{{ if lt (float64 .) (float64 $least) }}{{ $least = . }}{{ end }}{{ end }}{{ end }}
{{- end }}
{{- $_ := set $names (printf "least_%s" $name) $least }}
{{- end }}
{{- $labels := ternary $own.labels $default.labels (hasKey $own "labels") | default list }}
{{- range $name, $labels := dict "" (concat $labels (list "job" "instance")) "_fleet" (concat $labels (list "job")) }}
{{- $asked := list }}{{ $told := list }}
{{- range $labels }}{{ $asked = append $asked (printf "%s=%%q" .) }}{{ $told = append $told (printf "$labels.%s" .) }}{{ end }}
{{- $_ := set $names (printf "this%s" $name) (join "," $asked) }}
{{- $_ := set $names (printf "these%s" $name) (join " " $told) }}
{{- $_ := set $names (ternary "target" "fleet" (empty $name)) (join ", " $labels) }}
{{- end }}
{{- $_ := set $names "job" (include "vramledger.quotable" ($own.job | default $default.job)) }}
{{- $_ := set $names "fault_xids" (include "vramledger.quotable" ($own.fault_xids | default $default.fault_xids)) }}
{{- $run := .Values.prometheusRule.run | replace "{namespace}" .Release.Namespace | replace "{name}" (include "vramledger.part" .) }}
{{- $_ := set $names "run" ($own.run | default $run | replace "{instance}" "{{ $labels.instance }}") }}
{{- $severities := mergeOverwrite (deepCopy $default.severities) ($own.severities | default dict) }}
{{- range $name, $severity := $severities }}{{ $_ := set $names (printf "severity_%s" $name) (include "vramledger.quotable" $severity) }}{{ end }}
{{- $budgets := list }}
{{- range $own.budgets }}
{{- include "vramledger.known" (dict "given" . "known" (list "owner_type" "owner" "bytes") "place" "budgets: ") }}
{{- $bytes := include "vramledger.quantity" (dict "value" .bytes "key" "budgets: bytes") }}
{{- $budgets = append $budgets (dict "record" "vramledger_owner:memory_budget_bytes:threshold" "expr" (printf "vector(%s)\n" $bytes) "labels" (pick . "owner_type" "owner")) }}
{{- end }}
{{- dict "names" $names "owners" $owners "labels" $labels "budgets" $budgets "severities" $severities | toJson }}
{{- end }}

{{- define "vramledger.fill" -}}
{{- $text := .text }}
{{- range $name, $value := .names }}{{ $text = replace (printf "<<%s>>" $name) $value $text }}{{ end }}
{{- $text }}
{{- end }}

{{- define "vramledger.expression" -}}
{{- /* An expression with its thresholds, with a branch for each owner that has other ones. */}}
{{- $text := .text }}
{{- $names := .names }}
{{- $used := list }}
{{- range regexFindAll "<<\\w+>>" $text -1 | uniq }}{{ $used = append $used (. | trimPrefix "<<" | trimSuffix ">>") }}{{ end }}
{{- if not (has "owner_matchers" $used) }}{{ include "vramledger.fill" . }}
{{- else }}
{{- $others := "" }}
{{- $branches := list }}
{{- range .owners }}
{{- $given := dict }}
{{- range $name, $value := .thresholds }}
{{- if has $name $used }}{{ $_ := set $given $name (ternary "Inf" $value (and (eq $value "never") (hasSuffix "_share" $name))) }}{{ end }}
{{- end }}
{{- if $given }}
{{- if not (has "never" (values $given)) }}
{{- $matchers := printf ", %s=~\"%s\"%s" .label .pattern $others }}
{{- $branches = append $branches (include "vramledger.fill" (dict "text" $text "names" (merge (dict "owner_matchers" $matchers) $given $names)) | trimSuffix "\n") }}
{{- end }}
{{- $others = printf "%s, %s!~\"%s\"" $others .label .pattern }}
{{- end }}
{{- end }}
{{- $branches = prepend $branches (include "vramledger.fill" (dict "text" $text "names" (merge (dict "owner_matchers" $others) $names)) | trimSuffix "\n") }}
{{- if eq (len $branches) 1 }}{{ first $branches }}
{{- else }}
{{- $joined := list }}
{{- range $branches }}{{ $joined = append $joined (printf "(\n%s\n)" (regexReplaceAll "(?m)^(.+)$" . "  ${1}")) }}{{ end }}
{{- join "\nor\n" $joined }}
{{- end }}{{ "\n" }}
{{- end }}
{{- end }}
