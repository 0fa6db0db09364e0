{{/* What is wrong with the values beyond their schema, as a JSON list. files/requirements.yaml has most of the rules. */}}
{{- define "pdserve.problems" -}}
{{- if .Values.models -}}
{{- $own := include "pdserve.problemsOf" . | fromJsonArray }}{{ $problems := list -}}
{{- range $own }}{{ if not (hasPrefix "model." .) }}{{ $problems = append $problems . }}{{ end }}{{ end -}}
{{- $all := dict }}{{ include "pdserve.setRoots" (list $all .) }}
{{- $shared := $problems -}}
{{- range $place, $root := $all.roots -}}
{{- range include "pdserve.problemsOf" $root | fromJsonArray }}{{ if not (has . $shared) }}{{ $problems = append $problems (printf "models.%d.%s" $place .) }}{{ end }}{{ end -}}
{{- end -}}
{{- concat $problems (include "pdserve.modelsProblems" . | fromJsonArray) (include "pdserve.accountProblems" . | fromJsonArray) | toJson -}}
{{- else }}{{ concat (include "pdserve.problemsOf" . | fromJsonArray) (include "pdserve.accountProblems" . | fromJsonArray) | uniq | toJson }}{{ end -}}
{{- end }}

{{/* Operators that have the account of other pods, of whichever model, as a JSON list. */}}
{{- define "pdserve.accountProblems" -}}
{{- $all := dict }}{{ include "pdserve.setRoots" (list $all .) }}
{{- $users := dict }}{{ $problems := list -}}
{{- range $root := concat (list .) $all.roots | uniq -}}
{{- range $component := without (include "pdserve.components" $root | fromJsonArray) "autoscaler" -}}
{{- $account := include "pdserve.account" (list $root $component) -}}
{{- $_ := set $users $account (append (get $users $account | default list) (list $root.Model $component | compact | join "-")) -}}
{{- end -}}
{{- end -}}
{{- range $place, $root := $all.roots -}}
{{- range $user := get $users (include "pdserve.account" (list $root "autoscaler")) | default list -}}
{{- $key := empty $root.Model | ternary "" (printf "models.%d." $place) -}}
{{- $problems = append $problems (printf "%soperator.serviceAccount.name: must differ from that of %s: the operator may change the sizes of pools" $key $user) -}}
{{- end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end }}

{{/* The same of one root. */}}
{{- define "pdserve.problemsOf" -}}
{{- $problems := list -}}
{{- $parts := dict "router" "router" "frontends" "frontend" "prefill" "prefill" "decode" "decode" "operator" "autoscaler" -}}
{{- $values := dict -}}
{{- range $key, $value := .Values }}{{ $_ := set $values $key $value }}{{ end -}}
{{- range $part, $component := $parts }}{{ $_ := set $values $part (include "pdserve.values" (list $ $component) | fromJson) }}{{ end -}}
{{- range $rule := .Files.Get "files/requirements.yaml" | fromYamlArray -}}
{{- range $part := contains "*" $rule.key | ternary (keys $parts | sortAlpha) (list "") -}}
{{- $applies := true -}}
{{- range $key, $pattern := $rule.where -}}
{{- $value := include "pdserve.at" (list $values (replace "*" $part $key)) -}}
{{- if not (regexMatch (printf "^(%s)$" $pattern) $value) }}{{ $applies = false }}{{ end -}}
{{- end -}}
{{- $key := replace "*" $part $rule.key -}}
{{- if and $applies (not (regexMatch (printf "^(%s)$" $rule.is) (include "pdserve.at" (list $values $key)))) -}}
{{- $problems = append $problems (printf "%s: %s" $key $rule.say) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "pdserve.name" .)) -}}
{{- $problems = append $problems (printf "fullnameOverride: is required, because %s cannot be the name of a Service" (include "pdserve.name" .)) -}}
{{- end -}}
{{- range $pool := list "prefill" "decode" -}}
{{- $given := (index $.Values.autoscaling.policy.pools $pool).devicesPerReplica }}{{ $count := (get $values $pool).devices.count }}{{ $nodes := int (get $values $pool).nodes -}}
{{- if and $given $count (ne (int $given) (mul $nodes $count | int)) -}}
{{- $problems = append $problems (printf "autoscaling.policy.pools.%s.devicesPerReplica: is %d, and %s.devices.count is %d%s" $pool (int $given) $pool (int $count) (gt $nodes 1 | ternary (printf " on %d nodes" $nodes) "")) -}}
{{- end -}}
{{- end -}}
{{- $scaling := .Values.autoscaling -}}
{{- if and (include "pdserve.mayBeEmpty" (values $scaling.policy.pools)) (or (eq $scaling.by "hpa") (and (eq $scaling.by "keda") (eq $scaling.follow "waiting"))) -}}
{{- $problems = append $problems "autoscaling.policy.pools: minReplicas 0 needs autoscaling.by pdserve, or keda with follow desired: an HPA keeps one replica, and workers that are not there show no metric" -}}
{{- end -}}
{{- range include "pdserve.policyProblems" (list . (include "pdserve.policySpec" . | fromJson)) | fromJsonArray -}}
{{- $problems = append $problems (printf "autoscaling.policy.%s" .) -}}
{{- end -}}
{{- toJson $problems -}}
{{- end }}

{{/* The value at dotted keys, a text as it is and all else as JSON; nothing where there is none: takes (list values keys). */}}
{{- define "pdserve.at" -}}
{{- $value := index . 0 -}}
{{- range splitList "." (index . 1) -}}
{{- if kindIs "map" $value }}{{ $value = get $value . }}{{ else }}{{ $value = "" }}{{ end -}}
{{- end -}}
{{- if kindIs "string" $value }}{{ $value }}{{ else if not (kindIs "invalid" $value) }}{{ toJson $value }}{{ end -}}
{{- end }}

{{/* What an API server would refuse of a pod as a whole, as a JSON list: takes (list component pod). */}}
{{- define "pdserve.podProblems" -}}
{{- $component := index . 0 -}}{{- $pod := index . 1 -}}
{{- $problems := list -}}
{{- $containers := concat (default list $pod.initContainers) $pod.containers -}}
{{- $volumes := list -}}
{{- range $pod.volumes }}{{ $volumes = append $volumes .name }}{{ end -}}
{{- $names := list -}}
{{- range $containers -}}
{{- $container := .name -}}
{{- $names = append $names $container -}}
{{- $paths := list -}}
{{- range .volumeMounts -}}
{{- $paths = append $paths .mountPath -}}
{{- if not (has .name $volumes) }}{{ $problems = append $problems (printf "%s: the container %s mounts %s, which is no volume" $component $container .name) }}{{ end -}}
{{- end -}}
{{- if ne (len $paths) (len (uniq $paths)) }}{{ $problems = append $problems (printf "%s: two volumes are mounted at one path of the container %s" $component $container) }}{{ end -}}
{{- end -}}
{{- if ne (len $names) (len (uniq $names)) }}{{ $problems = append $problems (printf "%s: two containers have one name, among %s" $component (join ", " $names)) }}{{ end -}}
{{- if ne (len $volumes) (len (uniq $volumes)) }}{{ $problems = append $problems (printf "%s: two volumes have one name, among %s" $component (join ", " $volumes)) }}{{ end -}}
{{- toJson $problems -}}
{{- end }}

{{/* Ends the rendering where a JSON list of problems is not empty. */}}
{{- define "pdserve.refuse" -}}
{{- with fromJsonArray . }}{{ fail (printf "\n  %s" (join "\n  " .)) }}{{ end -}}
{{- end }}
