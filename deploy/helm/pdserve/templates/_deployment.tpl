{{/*
The Deployment of a component, and its ConfigMap, disruption budget and service account.

Takes a dict: root, component (as in the label), role (as in certificates), own (settings that the chart decides beside
the model, the secret and the certificate), command (of pdserve), args (with values of the downward API), mounts (folder
to the name of its secret, beside those two), single (no two pods at once).
*/}}
{{- define "pdserve.deployment" -}}
{{- $root := .root -}}
{{- $_ := set .own "secret_file" "/etc/pdserve/secret/secret" -}}
{{- $_ := set .mounts "secret" (include "pdserve.secretName" $root) -}}
{{- if ne $root.Values.tls.identity.from "none" -}}
{{- $_ := set .own "identity_dir" "/etc/pdserve/identity" -}}
{{- $_ := set .mounts "identity" (include "pdserve.identityName" (list $root .role)) -}}
{{- end -}}
{{- if ne .role "operator" -}}
{{- $_ := set .own "model" $root.Values.model.path -}}
{{- with $root.Values.model.servedName }}{{ $_ := set $.own "served_model_name" . }}{{ end -}}
{{- end -}}
{{- $values := include "pdserve.values" (list $root .component) | fromJson -}}
{{- $name := printf "%s-%s" (include "pdserve.name" $root) .component -}}
{{- $worker := hasKey $values "rdma" -}}
{{- $config := mergeOverwrite (deepCopy $values.config) (deepCopy .own) (dict "drain_timeout_s" $values.drainTimeoutSeconds "health_port" 50054 "metrics_port" 9464) | toYaml -}}
apiVersion: v1
kind: ConfigMap
metadata: {{- include "pdserve.metadata" (list $root .component) | nindent 2 }}
data:
  {{ .component }}.yaml: |
    {{- $config | nindent 4 }}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{- include "pdserve.metadata" (list $root .component) | nindent 2 }}
automountServiceAccountToken: false
---
{{- if $values.podDisruptionBudget.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "pdserve.metadata" (list $root .component) | nindent 2 }}
spec:
  maxUnavailable: {{ $values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels: {{- include "pdserve.podLabels" . | nindent 6 }}
---
{{- end }}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "pdserve.metadata" (list $root .component) | nindent 2 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  {{- if not (and $worker (ne $root.Values.autoscaling.by "none")) }}
  replicas: {{ $values.replicas }}
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
    metadata:
      labels:
        {{- include "pdserve.podLabels" . | nindent 8 }}
        {{- if $worker }}
        pdserve.dev/role: {{ .component }}
        {{- end }}
        {{- with $values.podLabels }}{{ toYaml . | nindent 8 }}{{ end }}
      annotations:
        checksum/config: {{ sha256sum $config }}
        {{- if and $worker $values.rdma.enabled $values.rdma.networks }}
        k8s.v1.cni.cncf.io/networks: {{ $values.rdma.networks | quote }}
        {{- end }}
        {{- with $values.podAnnotations }}{{ toYaml . | nindent 8 }}{{ end }}
    spec:
      {{- include "pdserve.pod" (merge (dict "values" $values "name" $name "worker" $worker) .) | nindent 6 }}
{{- end }}

{{- define "pdserve.podLabels" -}}
{{ include "pdserve.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The specification of a pod. Takes the dict of the Deployment, with values, name, worker. */}}
{{- define "pdserve.pod" -}}
{{- $root := .root -}}{{- $values := .values -}}
{{- $model := and (ne .component "autoscaler") $root.Values.model -}}
serviceAccountName: {{ .name }}
automountServiceAccountToken: {{ eq .component "autoscaler" }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add $values.drainTimeoutSeconds 30 }}
securityContext: {{- include "pdserve.podSecurity" $root | nindent 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with index $values $key }}
{{ $key }}: {{- if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- with $values.topologySpread }}
topologySpreadConstraints:
  - {{ toYaml . | nindent 4 | trim }}
    labelSelector:
      matchLabels: {{- include "pdserve.podLabels" $ | nindent 8 }}
{{- end }}
{{- if and $model (eq $model.source "hub") }}
initContainers:
  - name: download
    {{- include "pdserve.image" (list $root $values) | nindent 4 }}
    command: [hf, download, {{ required "model.hub.repository: is required where model.source is hub" $model.hub.repository | quote }}, --revision, {{ $model.hub.revision | quote }}, --local-dir, /models/model]
    {{- if not .worker }}
    args: [--exclude, "*.safetensors", --exclude, "*.bin"]
    {{- end }}
    {{- if $model.hub.tokenSecret }}
    env:
      - {name: HF_TOKEN_PATH, value: /etc/pdserve/hub/token}
    {{- end }}
    securityContext: {{- include "pdserve.containerSecurity" false | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: scratch, mountPath: /var/cache/pdserve}
      {{- if $model.hub.tokenSecret }}
      - {name: hub, mountPath: /etc/pdserve/hub, readOnly: true}
      {{- end }}
    resources: {{- toYaml $values.resources | nindent 6 }}
{{- end }}
containers:
  - name: {{ .component }}
    {{- include "pdserve.image" (list $root $values) | nindent 4 }}
    command: [pdserve, {{ .command | join ", " }}]
    args:
      {{- range .args }}
      - {{ . | quote }}
      {{- end }}
      - --health-host=$(POD_IP)
      - --metrics-host=$(POD_IP)
      {{- range $values.extraArgs }}
      - {{ . | quote }}
      {{- end }}
    env:
      - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
      - {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
      - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
      - {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
      {{- if .worker }}
      - {name: UCX_TCP_PORT_RANGE, value: "50060-50075"}
      {{- end }}
      {{- with $values.extraEnv }}{{ toYaml . | nindent 6 }}{{ end }}
    ports:
      {{- range $name, $port := .ports }}
      - {name: {{ $name }}, containerPort: {{ $port }}}
      {{- end }}
      - {name: health, containerPort: 50054}
      - {name: metrics, containerPort: 9464}
    startupProbe:
      grpc: {port: 50054, service: started}
      periodSeconds: 2
      failureThreshold: {{ div (add $values.startupTimeoutSeconds 1) 2 }}
    livenessProbe:
      grpc: {port: 50054, service: live}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    readinessProbe:
      grpc: {port: 50054, service: ready}
      periodSeconds: 2
      timeoutSeconds: 2
      failureThreshold: 2
    {{- with $values.preStopSleepSeconds }}
    lifecycle:
      preStop: {sleep: {seconds: {{ . }}}}
    {{- end }}
    resources: {{- include "pdserve.resources" (list $values .worker) | nindent 6 }}
    securityContext: {{- include "pdserve.containerSecurity" (and .worker $values.rdma.enabled $values.rdma.ipcLock) | nindent 6 }}
    volumeMounts:
      - {name: config, mountPath: /etc/pdserve/{{ .component }}.yaml, subPath: {{ .component }}.yaml, readOnly: true}
      {{- range $folder, $secret := .mounts }}
      - {name: {{ $folder }}, mountPath: /etc/pdserve/{{ $folder }}, readOnly: true}
      {{- end }}
      - {name: scratch, mountPath: /var/cache/pdserve}
      {{- if and $model (has $model.source (list "pvc" "image" "hub")) }}
      - name: models
        mountPath: /models
        readOnly: true
        {{- if and (eq $model.source "pvc") $model.pvc.subPath }}
        subPath: {{ $model.pvc.subPath }}
        {{- end }}
      {{- end }}
      {{- if .worker }}
      - {name: shm, mountPath: /dev/shm}
      {{- end }}
      {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 6 }}{{ end }}
volumes: {{- include "pdserve.volumes" . | nindent 2 }}
{{- end }}

{{- define "pdserve.volumes" -}}
{{- $root := .root -}}{{- $values := .values -}}{{- $model := $root.Values.model -}}
- name: config
  configMap: {name: {{ .name }}}
{{- range $folder, $secret := .mounts }}
- name: {{ $folder }}
  {{- if eq $folder "policy" }}
  configMap: {name: {{ $secret }}}
  {{- else }}
  secret: {secretName: {{ $secret }}, defaultMode: 0440}
  {{- end }}
{{- end }}
- name: scratch  # all that is ever written: the images set HOME and TMPDIR to it
  emptyDir: {}
{{- if ne .component "autoscaler" }}
{{- if eq $model.source "pvc" }}
- name: models
  persistentVolumeClaim: {claimName: {{ required "model.pvc.claimName: is required where model.source is pvc" $model.pvc.claimName }}, readOnly: true}
{{- else if eq $model.source "image" }}
- name: models
  image: {reference: {{ required "model.image.reference: is required where model.source is image" $model.image.reference }}, pullPolicy: {{ $model.image.pullPolicy }}}
{{- else if eq $model.source "hub" }}
- name: models
  emptyDir: {sizeLimit: {{ $model.hub.sizeLimit }}}
{{- with $model.hub.tokenSecret }}
- name: hub
  secret: {secretName: {{ .name }}, defaultMode: 0440, items: [{key: {{ .key }}, path: token}]}
{{- end }}
{{- end }}
{{- end }}
{{- if .worker }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
{{- end }}
{{- with $values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Requests and limits, with devices: takes (list values worker). */}}
{{- define "pdserve.resources" -}}
{{- $values := index . 0 -}}
{{- $resources := deepCopy $values.resources -}}
{{- if index . 1 -}}
{{- $limits := deepCopy (default dict $resources.limits) -}}
{{- if $values.devices.count -}}{{- $_ := set $limits $values.devices.resource $values.devices.count -}}{{- end -}}
{{- if $values.rdma.enabled -}}{{- $_ := set $limits $values.rdma.resourceName $values.rdma.count -}}{{- end -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* image and imagePullPolicy: takes (list root values). */}}
{{- define "pdserve.image" -}}
{{- $root := index . 0 -}}{{- $image := (index . 1).image -}}
image: {{ with $root.Values.global.imageRegistry }}{{ . }}/{{ end }}{{ $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default $root.Chart.AppVersion $image.tag }}{{ end }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end }}

{{- define "pdserve.podSecurity" -}}
runAsNonRoot: true
{{ toYaml .Values.podSecurity }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Takes whether memory may be locked, for RDMA. */}}
{{- define "pdserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if . }}
  add: [IPC_LOCK]
  {{- end }}
{{- end }}
