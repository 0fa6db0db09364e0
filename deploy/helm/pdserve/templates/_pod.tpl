{{/* The specification of a pod. Takes the dict of the Deployment, with values, name, worker, opensModel, modelPaths. */}}
{{- define "pdserve.pod" -}}
{{- $root := .root -}}{{- $values := .values -}}
{{- $model := and .opensModel $root.Values.model -}}
{{- $hooks := dict -}}
{{- with $values.preStopSleepSeconds }}{{ $_ := set $hooks "preStop" (dict "sleep" (dict "seconds" .)) }}{{ end -}}
{{- range $hook, $handler := $values.lifecycle }}{{ $_ := set $hooks $hook $handler }}{{ end -}}
serviceAccountName: {{ include "pdserve.account" (list $root .component) | quote }}
automountServiceAccountToken: {{ eq .component "autoscaler" }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add $values.drainTimeoutSeconds (dig "preStop" "sleep" "seconds" 0 $hooks) 30 }}
securityContext: {{- toYaml $values.podSecurityContext | nindent 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with index $values $key }}
{{ $key }}: {{- if kindIs "string" . }} {{ quote . }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
{{- range . }}
  - {{ toYaml . | nindent 4 | trim }}
    {{- if not .labelSelector }}
    labelSelector:
      matchLabels: {{- include "pdserve.podLabels" $ | nindent 8 }}
    {{- end }}
{{- end }}
{{- end }}
{{- $shared := and $model $model.persistence.enabled }}
{{- $download := and $model (or $shared (eq $model.source "hub")) }}
{{- $hubToken := and $model (eq $model.source "hub") $model.hub.tokenSecret }}
{{- if or $download $values.initContainers }}
initContainers:
{{- end }}
{{- if $download }}
{{- range $index, $path := .modelPaths }}
  - name: download{{ with $index }}-{{ . }}{{ end }}
    {{- include "pdserve.image" (list $root $values) | nindent 4 }}
    {{- if $shared }}
    command: [pdserve, models, fetch, {{ quote $path }}]
    {{- else }}
    command: [hf, download, {{ $model.hub.repository | quote }}, --revision, {{ $model.hub.revision | quote }}, --local-dir, /models/model]
    {{- if not $.worker }}
    args: [--exclude, "*.safetensors", --exclude, "*.bin"]
    {{- end }}
    {{- end }}
    {{- if or $shared $hubToken }}
    env:
      {{- if $shared }}
      - {name: PDSERVE_DOWNLOAD_DIR, value: /models}
      {{- end }}
      {{- if $hubToken }}
      - {name: HF_TOKEN_PATH, value: /etc/pdserve/hub/token}
      {{- end }}
    {{- end }}
    securityContext: {{- include "pdserve.containerSecurity" false | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: scratch, mountPath: /var/cache/pdserve}
      {{- if $hubToken }}
      - {name: hub, mountPath: /etc/pdserve/hub, readOnly: true}
      {{- end }}
    resources: {{- toYaml $values.resources | nindent 6 }}
{{- end }}
{{- end }}
{{- with $values.initContainers }}{{ toYaml . | nindent 2 }}{{ end }}
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
      {{- if $shared }}
      - {name: PDSERVE_DOWNLOAD_DIR, value: /models}
      {{- end }}
      {{- if .worker }}
      - {name: UCX_TCP_PORT_RANGE, value: "50060-50075"}
      {{- end }}
      {{- with $values.extraEnv }}{{ toYaml . | nindent 6 }}{{ end }}
    {{- with $values.extraEnvFrom }}
    envFrom: {{- toYaml . | nindent 6 }}
    {{- end }}
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
    {{- with $hooks }}
    lifecycle: {{- toYaml . | nindent 6 }}
    {{- end }}
    resources: {{- include "pdserve.resources" (list $values .worker) | nindent 6 }}
    securityContext: {{- include "pdserve.containerSecurity" (and .worker $values.rdma.enabled $values.rdma.ipcLock) | nindent 6 }}
    volumeMounts:
      {{- $file := .file | default .component }}
      - {name: config, mountPath: /etc/pdserve/{{ $file }}.yaml, subPath: {{ $file }}.yaml, readOnly: true}
      {{- range $folder, $secret := .mounts }}
      - {name: {{ $folder }}, mountPath: /etc/pdserve/{{ $folder }}, readOnly: true}
      {{- end }}
      - {name: scratch, mountPath: /var/cache/pdserve}
      {{- if and $model (or $shared (has $model.source (list "pvc" "image" "hub"))) }}
      - name: models
        mountPath: /models
        readOnly: true
        {{- if and (eq $model.source "pvc") $model.pvc.subPath }}
        subPath: {{ $model.pvc.subPath | quote }}
        {{- end }}
      {{- end }}
      {{- if .worker }}
      - {name: shm, mountPath: /dev/shm}
      {{- end }}
      {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 6 }}{{ end }}
{{- with $values.extraContainers }}{{ toYaml . | nindent 2 }}{{ end }}
volumes: {{- include "pdserve.volumes" . | nindent 2 }}
{{- end }}

{{- define "pdserve.volumes" -}}
{{- $root := .root -}}{{- $values := .values -}}{{- $model := $root.Values.model -}}
- name: config
  configMap: {name: {{ quote .name }}}
{{- range $folder, $secret := .mounts }}
- name: {{ $folder }}
  {{- if eq $folder "policy" }}
  configMap: {name: {{ quote $secret }}}
  {{- else }}
  secret: {secretName: {{ quote $secret }}, defaultMode: 0440}
  {{- end }}
{{- end }}
- name: scratch  # all that is ever written: the images set HOME and TMPDIR to it
  emptyDir: {}
{{- if .opensModel }}
{{- if $model.persistence.enabled }}
- name: models
  persistentVolumeClaim: {claimName: {{ include "pdserve.claimName" $root | quote }}}
{{- else if eq $model.source "pvc" }}
- name: models
  persistentVolumeClaim: {claimName: {{ $model.pvc.claimName | quote }}, readOnly: true}
{{- else if eq $model.source "image" }}
- name: models
  image: {reference: {{ $model.image.reference | quote }}, pullPolicy: {{ $model.image.pullPolicy }}}
{{- else if eq $model.source "hub" }}
- name: models
  emptyDir: {sizeLimit: {{ $model.hub.sizeLimit }}}
{{- end }}
{{- if and (eq $model.source "hub") $model.hub.tokenSecret }}
- name: hub
  secret: {secretName: {{ quote $model.hub.tokenSecret.name }}, defaultMode: 0440, items: [{key: {{ quote $model.hub.tokenSecret.key }}, path: token}]}
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
image: "{{ with $root.Values.global.imageRegistry }}{{ . }}/{{ end }}{{ $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default $root.Chart.AppVersion $image.tag }}{{ end }}"
imagePullPolicy: {{ $image.pullPolicy }}
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
