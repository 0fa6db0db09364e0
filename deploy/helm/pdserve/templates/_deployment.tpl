{{/*
The Deployment of a component, and its ConfigMap and disruption budget. Workers of several pods have a LeaderWorkerSet.

Takes a dict: root, component (as in the label), role (as in certificates), own (settings that the chart decides beside
the model, the secret and the certificate), command (of pdserve), args (with values of the downward API), mounts (folder
to the name of its secret, beside those two), ports (by name), single (no two pods at once), node (of a worker's pods
but the first one: settings and args).
*/}}
{{- define "pdserve.deployment" -}}
{{- $root := .root -}}
{{- $_ := set .own "secret_file" "/etc/pdserve/secret/secret" -}}
{{- $_ := set .mounts "secret" (include "pdserve.secretName" $root) -}}
{{- if ne $root.Values.tls.identity.from "none" -}}
{{- $_ := set .own "identity_dir" "/etc/pdserve/identity" -}}
{{- $_ := set .mounts "identity" (include "pdserve.identityName" (list $root .role)) -}}
{{- end -}}
{{- $paths := list (include "pdserve.modelPath" $root) -}}
{{- if and (eq .component "frontend") $root.Values.models -}}
{{- $models := include "pdserve.frontendModels" $root | fromJsonArray -}}
{{- $_ := set .own "models" $models }}{{ $_ := unset .own "routers" -}}
{{- $paths = list }}{{ range $models }}{{ $paths = append $paths .model }}{{ end -}}
{{- else if ne .role "operator" -}}
{{- $_ := set .own "model" (include "pdserve.modelPath" $root) -}}
{{- with include "pdserve.servedName" $root }}{{ $_ := set $.own "served_model_name" . }}{{ end -}}
{{- end -}}
{{- $values := include "pdserve.values" (list $root .component) | fromJson -}}
{{- $name := printf "%s-%s" (include "pdserve.name" $root) .component -}}
{{- $worker := hasKey $values "rdma" -}}
{{- $opens := or $worker (eq .component (include "pdserve.serving" $root)) (and (hasKey .own "model") (not .own.served_model_name)) -}}
{{- $pod := include "pdserve.pod" (merge (dict "values" $values "name" $name "worker" $worker "opensModel" $opens "modelPaths" $paths) .) -}}
{{- include "pdserve.refuse" (include "pdserve.podProblems" (list .component ($pod | fromYaml))) -}}
{{- $config := mergeOverwrite (deepCopy $values.config) (deepCopy .own) (dict "drain_timeout_s" $values.drainTimeoutSeconds "health_port" 50054 "metrics_port" 9464) | toYaml -}}
apiVersion: v1
kind: ConfigMap
metadata: {{- include "pdserve.metadata" (list $root .component) | nindent 2 }}
data:
  {{ .component }}.yaml: |
    {{- $config | nindent 4 }}
  {{- with .node }}
  node.yaml: |
    {{- mergeOverwrite (pick $values.config "log_level" "log_format" "join_timeout_s" "metrics") .own (pick $.own "model" "secret_file" "identity_dir" "handoff_rdma_devices" "termination_message_file") (dict "drain_timeout_s" $values.drainTimeoutSeconds "health_port" 50054 "metrics_port" 9464) | toYaml | nindent 4 }}
  {{- end }}
---
{{- if $values.podDisruptionBudget.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "pdserve.metadata" (list $root .component) | nindent 2 }}
spec:
  {{- with $values.podDisruptionBudget }}
  {{- if ne (toString .minAvailable) "" }}
  minAvailable: {{ toJson .minAvailable }}
  {{- else }}
  maxUnavailable: {{ eq (toString .maxUnavailable) "" | ternary 1 .maxUnavailable | toJson }}
  {{- end }}
  {{- end }}
  selector:
    matchLabels: {{- include "pdserve.podLabels" . | nindent 6 }}
---
{{- end }}
{{- if .node }}
{{ include "pdserve.leaderWorkerSet" (merge (dict "pod" $pod "values" $values "name" $name "config" $config) .) }}
{{- else }}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "pdserve.metadata" (list $root .component) | nindent 2 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  {{- if not (and $worker (ne $root.Values.autoscaling.by "none")) }}
  replicas: {{ int $values.replicas }}
  {{- end }}
  revisionHistoryLimit: 5
  {{- if .single }}
  strategy: {type: Recreate}
  {{- else }}
  {{- with $values.strategy }}
  strategy: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  selector:
    matchLabels: {{- include "pdserve.podLabels" . | nindent 6 }}
  template:
    metadata: {{- include "pdserve.podMetadata" (merge (dict "values" $values "worker" $worker "config" $config) .) | nindent 6 }}
    spec:
      {{- $pod | nindent 6 }}
{{- end }}
{{- end }}

{{/* Takes the dict of the Deployment, with pod, values, name and config. */}}
{{- define "pdserve.leaderWorkerSet" -}}
{{- $metadata := include "pdserve.podMetadata" (merge (dict "worker" true) .) -}}
{{- $values := mergeOverwrite (deepCopy .values) (dict "extraArgs" (list)) -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  {{- include "pdserve.metadata" (list .root .component) | nindent 2 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  {{- if eq .root.Values.autoscaling.by "none" }}
  replicas: {{ int .values.replicas }}
  {{- end }}
  startupPolicy: LeaderCreated
  {{- with .values.strategy.rollingUpdate }}
  rolloutStrategy: {type: RollingUpdate, rollingUpdateConfiguration: {{ toJson . }}}
  {{- end }}
  leaderWorkerTemplate:
    size: {{ int .values.nodes }}
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      metadata: {{- $metadata | nindent 8 }}
      spec:
        {{- .pod | nindent 8 }}
    workerTemplate:
      metadata: {{- $metadata | nindent 8 }}
      spec:
        {{- include "pdserve.pod" (mergeOverwrite (dict) . (dict "values" $values "worker" true "opensModel" true "file" "node" "command" (list "worker-node") "args" .node.args "ports" dict)) | nindent 8 }}
{{- end }}

{{/* Metadata of a component's pods. Takes the dict of the Deployment, with values, worker and config. */}}
{{- define "pdserve.podMetadata" -}}
labels:
  {{- include "pdserve.podLabels" . | nindent 2 }}
  {{- if .worker }}
  pdserve.dev/role: {{ .component }}
  {{- end }}
  {{- with .values.podLabels }}{{ toYaml . | nindent 2 }}{{ end }}
annotations:
  checksum/config: {{ sha256sum .config }}
  {{- if .node }}
  pdserve.dev/nodes: {{ .values.nodes | quote }}
  {{- end }}
  {{- if and .worker .values.rdma.enabled .values.rdma.networks }}
  k8s.v1.cni.cncf.io/networks: {{ .values.rdma.networks | quote }}
  {{- end }}
  {{- with .values.podAnnotations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{- define "pdserve.podLabels" -}}
{{ include "pdserve.selector" (and (eq .component "frontend") .root.Top | default .root) }}
app.kubernetes.io/component: {{ .component }}
{{- end }}
