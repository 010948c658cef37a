{{- define "vramledger.part" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{- define "vramledger.name" -}}
{{- $part := include "vramledger.part" . -}}
{{- $name := .Release.Name -}}
{{- if not (contains $part $name) }}{{ $name = printf "%s-%s" $name $part }}{{ end -}}
{{- $name | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{- define "vramledger.selector" -}}
app.kubernetes.io/name: {{ include "vramledger.part" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "vramledger.labels" -}}
{{ include "vramledger.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: exporter
{{- end }}

{{- define "vramledger.image" -}}
{{- /* Without a name the runtime would take the image of a stranger, from the registry that it asks by default. */}}
{{- $repository := required "image.repository is not set: name the registry to which you pushed the image, --set image.repository=REGISTRY/vramledger" .Values.image.repository -}}
{{- if not (regexMatch "^[a-z0-9][-a-z0-9._/:]*$" $repository) }}
{{- fail (printf "at '/image/repository': '%s' is not the name of an image: put the registry to which you pushed it in place of REGISTRY, in lower case, for example registry.example.com/vramledger" $repository) }}
{{- end }}
{{- if .Values.image.digest }}{{ $repository }}@{{ .Values.image.digest }}
{{- else }}{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "vramledger.visible" -}}
{{- /* How the container asks for the GPUs; only one way may be used at a time. */}}
{{- if eq .Values.driver.from "env" }}all{{ else if eq .Values.driver.from "volume" }}/var/run/nvidia-container-devices{{ else }}void{{ end }}
{{- end }}
