{{/* The AutoscalingPolicy, and what `pdserve autoscale validate` refuses of it, in the same words. */}}

{{/* The policy without apiVersion, kind and actuator, with what other values imply, as JSON. */}}
{{- define "pdserve.policySpec" -}}
{{- $policy := deepCopy .Values.autoscaling.policy -}}
{{- range $name, $pool := $policy.pools -}}
{{- $values := include "pdserve.values" (list $ $name) | fromJson -}}
{{- if and $values.devices.count (not (hasKey $pool "devicesPerReplica")) }}{{ $_ := set $pool "devicesPerReplica" (mul $values.devices.count $values.nodes) }}{{ end -}}
{{- if and $values.drainTimeoutSeconds (not (hasKey $pool "drainTimeout")) }}{{ $_ := set $pool "drainTimeout" $values.drainTimeoutSeconds }}{{ end -}}
{{- end -}}
{{- toJson $policy -}}
{{- end }}

{{/* Not empty if a pool of the policy may have no replicas: takes (list pool ..). */}}
{{- define "pdserve.mayBeEmpty" -}}
{{- range . -}}
{{- if eq (dig "minReplicas" 1 . | int64) 0 }}yes{{ end -}}
{{- range .schedules }}{{ if eq (dig "minReplicas" 1 . | int64) 0 }}yes{{ end }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "pdserve.policy" -}}
{{- $name := include "pdserve.name" . -}}
{{- $actuator := dict "kind" "publish" -}}
{{- if eq .Values.autoscaling.by "pdserve" -}}
{{- $actuator = dict "kind" "kubernetes" "namespace" .Release.Namespace "lease" (printf "%s-autoscaler" $name) "prefill" (dict "name" (printf "%s-prefill" $name)) "decode" (dict "name" (printf "%s-decode" $name)) -}}
{{- end -}}
{{- merge (dict "apiVersion" "pdserve/v1alpha1" "kind" "AutoscalingPolicy" "actuator" $actuator) (include "pdserve.policySpec" . | fromJson) | toYaml -}}
{{- end }}

{{/*
What is wrong with a policy, as a JSON list: takes (list root policy). Parts are checked before what holds them, as the
autoscaler does: of what is wrong between parts, the first is named.
*/}}
{{- define "pdserve.policyProblems" -}}
{{- $root := index . 0 -}}{{- $policy := index . 1 -}}
{{- $zones := include "pdserve.timeZones" $root | fromJson -}}
{{- $found := include "pdserve.durationProblems" (list $root $policy) | fromJsonArray -}}
{{- range $name := list "prefill" "decode" -}}
{{- $bad := list }}{{ range $found }}{{ if hasPrefix (printf "pools.%s." $name) . }}{{ $bad = append $bad . }}{{ end }}{{ end -}}
{{- $found = concat $found (include "pdserve.poolProblems" (list $name (get $policy.pools $name) $zones $bad) | fromJsonArray) -}}
{{- end -}}
{{- if not $found -}}
{{- $between := list
  (include "pdserve.scheduleProblem" (list "prefill" $policy.pools.prefill $zones))
  (include "pdserve.scheduleProblem" (list "decode" $policy.pools.decode $zones))
  (include "pdserve.budgetProblem" (list $policy $zones))
  (include "pdserve.roleSwitchProblem" $policy)
  (include "pdserve.forecasterProblem" $policy) -}}
{{- with compact $between }}{{ $found = list (first .) }}{{ end -}}
{{- end -}}
{{- default list $found | toJson -}}
{{- end }}

{{/* Texts with units are held to the limits of numbers. files/policy.json names all durations. */}}
{{- define "pdserve.durationProblems" -}}
{{- $root := index . 0 -}}{{- $policy := index . 1 -}}{{- $found := list -}}
{{- range $duration := ($root.Files.Get "files/policy.json" | fromJson).durations -}}
{{- range $place, $text := include "pdserve.spread" (list $policy $duration.key) | fromJson -}}
{{- if kindIs "string" $text -}}
{{- $seconds := include "pdserve.seconds" $text | float64 -}}
{{- $shown := regexReplaceAll "^([0-9]+)$" (toString $seconds) "${1}.0" -}}
{{- range $limit := $duration.limits -}}
{{- $bound := float64 $limit.bound -}}
{{- $kept := dict "greater than" (gt $seconds $bound) "greater than or equal to" (ge $seconds $bound) "less than or equal to" (le $seconds $bound) -}}
{{- if not (get $kept $limit.is) }}{{ $found = append $found (printf "%s: %s is refused: Input should be %s %s" $place $shown $limit.is (toJson $limit.bound)) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- default list $found | toJson -}}
{{- end }}

{{/* Values at a place by their places, as JSON; * stands for each member of a list: takes (list value place). */}}
{{- define "pdserve.spread" -}}
{{- $here := dict "" (index . 0) -}}
{{- range $step := splitList "." (index . 1) -}}
{{- $next := dict -}}
{{- range $place, $value := $here -}}
{{- if and (eq $step "*") (kindIs "slice" $value) -}}
{{- range $index, $member := $value }}{{ $_ := set $next (printf "%s.%d" $place $index | trimPrefix ".") $member }}{{ end -}}
{{- else if and (kindIs "map" $value) (hasKey $value $step) -}}
{{- $_ := set $next (printf "%s.%s" $place $step | trimPrefix ".") (get $value $step) -}}
{{- end -}}
{{- end -}}
{{- $here = $next -}}
{{- end -}}
{{- toJson $here -}}
{{- end }}

{{/* Seconds of a duration such as 90s or 1h30m; a number is returned as it is. */}}
{{- define "pdserve.seconds" -}}
{{- if kindIs "string" . -}}
{{- $units := dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 "d" 86400.0 -}}
{{- $sum := 0.0 -}}
{{- range regexFindAll "\\d+(\\.\\d+)?(ms|s|m|h|d)" . -1 -}}
{{- $sum = addf $sum (mulf (regexFind "^[0-9.]+" . | float64) (get $units (regexFind "[a-z]+$" .))) -}}
{{- end -}}
{{- $sum -}}
{{- else }}{{ . }}{{ end -}}
{{- end }}

{{/* What is wrong within a pool, as a JSON list: takes (list name pool zones bad). `bad`: of its durations. */}}
{{- define "pdserve.poolProblems" -}}
{{- $place := printf "pools.%s" (index . 0) -}}{{- $pool := index . 1 -}}{{- $zones := index . 2 -}}
{{- $found := list -}}
{{- range $index, $signal := $pool.signals -}}
{{- if and (eq .metric "kv_usage") (gt (float64 .target) 1.0) -}}
{{- $found = append $found (printf "%s.signals.%d.target: %.6g is above 1, the greatest kv_usage" $place $index (float64 .target)) -}}
{{- end -}}
{{- end -}}
{{- range $index, $schedule := $pool.schedules -}}
{{- $here := printf "%s.schedules.%d" $place $index -}}
{{- if not (hasKey $zones (dig "timeZone" "UTC" .)) -}}
{{- $found = append $found (printf "%s.timeZone: '%s' is refused: is no time zone" $here .timeZone) -}}
{{- else if not (or (hasKey . "minReplicas") (hasKey . "maxReplicas")) -}}
{{- $found = append $found (printf "%s: sets neither minReplicas nor maxReplicas" $here) -}}
{{- else if eq .start .end -}}
{{- $found = append $found (printf "%s.end: %s is the start as well; the whole day is 00:00 to 24:00" $here .end) -}}
{{- end -}}
{{- end -}}
{{- if not (or $found (index . 3)) -}}
{{- $least := dig "minReplicas" 1 $pool | int64 -}}{{- $most := int64 $pool.maxReplicas -}}
{{- $fallback := (default dict $pool.fallback).replicas | int64 -}}
{{- $metrics := list }}{{ range $pool.signals }}{{ $metrics = append $metrics .metric }}{{ end -}}
{{- if gt $least $most -}}
{{- $found = append $found (printf "%s.minReplicas: %d is above maxReplicas, %d" $place $least $most) -}}
{{- else if and $fallback (or (lt $fallback $least) (gt $fallback $most)) -}}
{{- $found = append $found (printf "%s.fallback.replicas: %d is not between minReplicas, %d, and maxReplicas, %d" $place $fallback $least $most) -}}
{{- else if ne (len $metrics) (len (uniq $metrics)) -}}
{{- $index := 0 }}{{ range $at, $metric := $metrics }}{{ if and (not $index) (has $metric (slice $metrics 0 $at)) }}{{ $index = $at }}{{ end }}{{ end -}}
{{- $found = append $found (printf "%s.signals.%d.metric: %s is there twice" $place $index (index $metrics $index)) -}}
{{- end -}}
{{- end -}}
{{- default list $found | toJson -}}
{{- end }}

{{- define "pdserve.roleSwitchProblem" -}}
{{- $prefill := default 1 .pools.prefill.devicesPerReplica | int64 -}}{{- $decode := default 1 .pools.decode.devicesPerReplica | int64 -}}
{{- $enabled := dig "enabled" true (default dict .roleSwitch) -}}
{{- if and $enabled (ne $prefill $decode) -}}
{{- printf "roleSwitch.enabled: must be false where devicesPerReplica of the pools differ, %d and %d" $prefill $decode -}}
{{- end -}}
{{- end }}

{{- define "pdserve.forecasterProblem" -}}
{{- $interval := default dict .interval -}}{{- $forecaster := default dict .forecaster -}}
{{- $every := include "pdserve.seconds" (dig "forecast" 60 $interval) | float64 -}}
{{- $react := include "pdserve.seconds" (dig "react" 5 $interval) | float64 -}}
{{- $season := include "pdserve.seconds" (default 0 $forecaster.season) | float64 -}}
{{- if gt $react $every -}}
{{- printf "interval.react: %.6gs is above interval.forecast, %.6gs" $react $every -}}
{{- else if ne (eq (default "kalman" $forecaster.kind) "holt-winters") (gt $season 0.0) -}}
forecaster.season: is what holt-winters needs, and no other kind
{{- else if gt $season 0.0 -}}
{{- $times := divf $season $every -}}
{{- if or (lt $times 2.0) (gt $times 20160.0) -}}
{{- printf "forecaster.season: %.6gs is %.6g times interval.forecast, %.6gs; it must be 2 to 20160 times as long" $season $times $every -}}
{{- end -}}
{{- end -}}
{{- end }}
