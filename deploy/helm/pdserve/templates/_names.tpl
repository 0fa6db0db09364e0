{{/* Names and labels. */}}

{{- define "pdserve.name" -}}
{{- if .Model -}}{{ include "pdserve.name" .Top }}-{{ .Model }}{{ else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}
{{- end }}

{{- define "pdserve.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- with .Model }}
pdserve.dev/model: {{ quote . }}
{{- end }}
{{- end }}

{{- define "pdserve.labels" -}}
{{ include "pdserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Metadata of an object: takes (list root suffix). */}}
{{- define "pdserve.metadata" -}}
{{- $root := index . 0 -}}
name: {{ printf "%s-%s" (include "pdserve.name" $root) (index . 1) | trimSuffix "-" | quote }}
namespace: {{ $root.Release.Namespace | quote }}
labels: {{- include "pdserve.labels" $root | nindent 2 }}
{{- end }}

{{/* Names of secrets, which the operator may have made. */}}
{{- define "pdserve.secretName" -}}{{ default (printf "%s-secret" (include "pdserve.name" .)) .Values.secret.existingSecret }}{{- end }}
{{- define "pdserve.keysName" -}}{{ default (printf "%s-keys" (include "pdserve.name" .)) .Values.keys.existingSecret }}{{- end }}
{{- define "pdserve.tlsName" -}}
{{- if eq .Values.tls.public.from "secret" -}}{{ .Values.tls.public.existingSecret }}
{{- else -}}{{ include "pdserve.name" . }}-tls{{- end -}}
{{- end }}

{{/* Secret with the identity of a role: takes (list root role). */}}
{{- define "pdserve.identityName" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $identity := $root.Values.tls.identity -}}
{{- if eq $identity.from "secret" -}}{{ index $identity.existingSecrets $role }}
{{- else -}}{{ include "pdserve.name" $root }}-identity-{{ $role }}{{- end -}}
{{- end }}

{{/* DNS names of the public port, as JSON. */}}
{{- define "pdserve.dnsNames" -}}
{{- $name := include "pdserve.name" . -}}{{- $space := .Release.Namespace -}}
{{- concat (list $name (printf "%s.%s" $name $space) (printf "%s.%s.svc" $name $space) (printf "%s.%s.svc.cluster.local" $name $space)) .Values.tls.public.dnsNames | toJson -}}
{{- end }}

{{- define "pdserve.routers" -}}{{ include "pdserve.name" . }}-routers.{{ .Release.Namespace }}.svc:50052{{- end }}

{{/*
Values of a component, over what it has in common with others, as JSON: takes (list root component).
What a value implies is filled in: the image of workers, and settings that frontends share with routers.
*/}}
{{- define "pdserve.values" -}}
{{- $values := (index . 0).Values -}}{{- $component := index . 1 -}}
{{- $common := deepCopy $values.pods -}}
{{- $above := list (index $values (get (dict "autoscaler" "operator" "frontend" "frontends") $component | default $component)) -}}
{{- if has $component (list "prefill" "decode") }}{{ $above = prepend $above $values.workers }}{{ end -}}
{{- if eq $component "frontend" -}}
{{- $shared := omit (default dict $values.router.config) "placement" "kv_events" "profile" "local_prefill" "converts_kv" "scale_to_zero" "worker_silence_s" "pool_grace_s" "max_num_requests" "max_num_held" "max_hold_s" "max_attempts" "max_interruptions" -}}
{{- $above = prepend $above (dict "config" $shared) -}}
{{- end -}}
{{- range $above -}}
{{- $common = mergeOverwrite $common (deepCopy .) -}}
{{- range $hook, $handler := .lifecycle }}{{ if $handler }}{{ $_ := set $common.lifecycle $hook $handler }}{{ end }}{{ end -}}
{{- end -}}
{{- if and $common.devices (not $common.image.repository) -}}
{{- $_ := set $common.image "repository" (eq (int $common.devices.count) 0 | ternary "pdserve-worker-cpu" "pdserve-worker-cuda") -}}
{{- end -}}
{{- if and (eq $component "frontend") $values.models (not $common.replicas) }}{{ $_ := set $common "replicas" 1 }}{{ end -}}
{{- toJson $common -}}
{{- end }}

{{/* Name of a component's service account: takes (list root component). */}}
{{- define "pdserve.account" -}}
{{- (include "pdserve.values" . | fromJson).serviceAccount.name | default (printf "%s-%s" (include "pdserve.name" (index . 0)) (index . 1)) -}}
{{- end }}

{{/* The component that serves clients. */}}
{{- define "pdserve.serving" -}}
{{- (include "pdserve.values" (list . "frontend") | fromJson).replicas | empty | ternary "router" "frontend" -}}
{{- end }}

{{/* All components of a root that have a Deployment, as JSON. */}}
{{- define "pdserve.components" -}}
{{- if and .Values.models (not .Model) }}{{ list "frontend" | toJson }}
{{- else if .Model }}{{ list "router" "prefill" "decode" "autoscaler" | toJson }}
{{- else }}{{ list "router" (include "pdserve.serving" .) "prefill" "decode" "autoscaler" | uniq | toJson }}{{ end -}}
{{- end }}

{{/* What processes open as the model, and the name that they serve it by; empty: the model's own. */}}
{{- define "pdserve.modelPath" -}}
{{- with .Values.model }}
{{- if and (eq .source "hub") .persistence.enabled }}{{ .hub.repository }}@{{ .hub.revision }}
{{- else }}{{ .path | default (eq .source "hub" | ternary "/models/model" "smollm2-135m-instruct") }}{{ end -}}
{{- end -}}
{{- end }}

{{/* The claim on which models are kept. */}}
{{- define "pdserve.claimName" -}}{{ .Values.model.persistence.existingClaim | default (printf "%s-models" (include "pdserve.name" (.Top | default .))) }}{{- end }}
{{- define "pdserve.servedName" -}}
{{- with .Values.model }}{{ .servedName | default (eq .source "hub" | ternary .hub.repository "") }}{{ end -}}
{{- end }}

{{/* Whether the autoscaler runs, rather than the watcher alone. */}}
{{- define "pdserve.autoscales" -}}
{{- with .Values.autoscaling }}{{ if or (eq .by "pdserve") (and (has .by (list "hpa" "keda")) (eq .follow "desired")) }}true{{ end }}{{ end -}}
{{- end }}
