{{/* Limits that hold at certain hours: whether they agree with each other and with the budget, at any hour of a year. */}}

{{/* Offsets of each time zone as JSON: its name to a list of (since which Unix second, seconds from UTC). */}}
{{- define "pdserve.timeZones" -}}
{{- $zones := dict -}}
{{- range (.Files.Get "files/policy.json" | fromJson).timeZones -}}
{{- $offsets := .offsets }}{{ range .names }}{{ $_ := set $zones . $offsets }}{{ end -}}
{{- end -}}
{{- toJson $zones -}}
{{- end }}

{{/* Seconds from UTC at a moment: takes (list offsets unix). */}}
{{- define "pdserve.offset" -}}
{{- $unix := index . 1 -}}{{- $found := 0 -}}
{{- range index . 0 }}{{ if le (index . 0 | int64) $unix }}{{ $found = index . 1 | int64 }}{{ end }}{{ end -}}
{{- $found -}}
{{- end }}

{{/* Unix seconds of a clock's time; the first of two, and past a gap as if there were none: takes (list offsets local). */}}
{{- define "pdserve.moment" -}}
{{- $local := index . 1 -}}{{- $found := index (index . 0) 0 1 | int64 -}}{{- $before := $found -}}
{{- range rest (index . 0) -}}
{{- $after := index . 1 | int64 -}}
{{- if ge $local (add (index . 0 | int64) (max $before $after)) }}{{ $found = $after }}{{ end -}}
{{- $before = $after -}}
{{- end -}}
{{- sub $local $found -}}
{{- end }}

{{/* Whether a schedule holds at a moment: takes (list schedule offsets unix). */}}
{{- define "pdserve.holds" -}}
{{- $schedule := index . 0 -}}{{- $unix := index . 2 -}}
{{- $days := list "Thu" "Fri" "Sat" "Sun" "Mon" "Tue" "Wed" -}}
{{- $local := add $unix (include "pdserve.offset" (list (index . 1) $unix) | int64) -}}
{{- $day := div $local 86400 -}}
{{- $now := printf "%02d:%02d" (div (mod $local 86400) 3600) (div (mod $local 3600) 60) -}}
{{- $on := default $days $schedule.daysOfWeek -}}
{{- $today := has (index $days (mod $day 7 | int)) $on -}}
{{- if lt $schedule.start $schedule.end -}}
{{- if and $today (le $schedule.start $now) (lt $now $schedule.end) }}true{{ end -}}
{{- else if or (and $today (ge $now $schedule.start)) (and (has (index $days (mod (add $day 6) 7 | int)) $on) (lt $now $schedule.end)) -}}
true
{{- end -}}
{{- end }}

{{/*
Moments among which each combination of schedules holds that ever holds, as a JSON list in order: takes (list schedules
zones). They are the starts and ends in one week for each combination of offsets that the time zones have in a year.
*/}}
{{- define "pdserve.changes" -}}
{{- $schedules := index . 0 -}}{{- $zones := index . 1 -}}
{{- $monday := 1767571200 -}}{{/* the first of 2026, the year whose weeks stand for all */ -}}
{{- $used := list }}{{ range $schedules }}{{ $used = append $used (default "UTC" .timeZone) }}{{ end -}}
{{- $weeks := dict -}}
{{- range $week := until 53 -}}
{{- $start := add $monday (mul $week 604800) -}}{{- $key := "" -}}
{{- range $zone := uniq $used | sortAlpha -}}
{{- range $at := list $start (add $start 604800) }}{{ $key = printf "%s %s" $key (include "pdserve.offset" (list (get $zones $zone) $at)) }}{{ end -}}
{{- end -}}
{{- $_ := set $weeks $key $start -}}
{{- end -}}
{{- $found := dict -}}
{{- range $schedule := $schedules -}}
{{- $offsets := get $zones (default "UTC" .timeZone) -}}
{{- range $start := values $weeks -}}
{{- range $index, $day := list "Mon" "Tue" "Wed" "Thu" "Fri" "Sat" "Sun" -}}
{{- if or (not $schedule.daysOfWeek) (has $day $schedule.daysOfWeek) -}}
{{- range $clock := list $schedule.start $schedule.end -}}
{{- $late := and (eq $clock $schedule.end) (lt $schedule.end $schedule.start) | ternary 86400 0 -}}
{{- $parts := splitList ":" $clock -}}
{{- $seconds := add (mul (first $parts | trimPrefix "0" | int64) 3600) (mul (last $parts | trimPrefix "0" | int64) 60) -}}
{{- $moment := include "pdserve.moment" (list $offsets (add $start (mul $index 86400) $late $seconds)) -}}
{{- $_ := set $found $moment true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- keys $found | sortAlpha | default (list (toString $monday)) | toJson -}}
{{- end }}

{{/* Limits of a pool at a moment, as JSON: takes (list pool zones unix). */}}
{{- define "pdserve.bounds" -}}
{{- $pool := index . 0 -}}{{- $zones := index . 1 -}}{{- $unix := index . 2 -}}
{{- $held := list }}{{ $least := list }}{{ $most := list -}}
{{- range $index, $schedule := $pool.schedules -}}
{{- if include "pdserve.holds" (list . (get $zones (default "UTC" .timeZone)) $unix) -}}
{{- $held = append $held $index -}}
{{- if hasKey . "minReplicas" }}{{ $least = append $least (int64 .minReplicas) }}{{ end -}}
{{- with .maxReplicas }}{{ $most = append $most (int64 .) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $lower := dig "minReplicas" 1 $pool | int64 }}{{ with $least }}{{ $lower = 0 }}{{ range . }}{{ $lower = max $lower . }}{{ end }}{{ end -}}
{{- $upper := int64 $pool.maxReplicas }}{{ with $most }}{{ $upper = 0 }}{{ range . }}{{ $upper = max $upper . }}{{ end }}{{ end -}}
{{- dict "held" $held "least" $lower "most" $upper "devices" (default 1 $pool.devicesPerReplica | int64) | toJson -}}
{{- end }}

{{/* The hour at which limits are compared; nothing where they are the same at all hours: takes (list unix pools). */}}
{{- define "pdserve.hour" -}}
{{- $unix := index . 0 -}}{{- $scheduled := false -}}
{{- range index . 1 }}{{ if .schedules }}{{ $scheduled = true }}{{ end }}{{ end -}}
{{- if $scheduled -}}
{{- $day := index (list "Thu" "Fri" "Sat" "Sun" "Mon" "Tue" "Wed") (mod (div $unix 86400) 7 | int) -}}
{{- printf " on %s at %02d:%02d UTC" $day (div (mod $unix 86400) 3600) (div (mod $unix 3600) 60) -}}
{{- end -}}
{{- end }}

{{/* The first thing that is wrong between the schedules of a pool: takes (list name pool zones). */}}
{{- define "pdserve.scheduleProblem" -}}
{{- $place := printf "pools.%s" (index . 0) -}}{{- $pool := index . 1 -}}{{- $zones := index . 2 -}}{{- $found := "" -}}
{{- range include "pdserve.changes" (list (default list $pool.schedules) $zones) | fromJsonArray -}}
{{- $unix := int64 . -}}
{{- if not $found -}}
{{- $bounds := include "pdserve.bounds" (list $pool $zones $unix) | fromJson -}}
{{- $hour := include "pdserve.hour" (list $unix (list $pool)) -}}
{{- range $field := list "minReplicas" "maxReplicas" -}}
{{- $asking := list }}{{ range $bounds.held }}{{ if hasKey (index $pool.schedules (int .)) $field }}{{ $asking = append $asking (int .) }}{{ end }}{{ end -}}
{{- range rest $asking -}}
{{- $count := get (index $pool.schedules .) $field | int64 }}{{ $other := get (index $pool.schedules (first $asking)) $field | int64 -}}
{{- if and (not $found) (ne $count $other) -}}
{{- $found = printf "%s.schedules.%d: asks for %d as %s, and schedules.%d for %d at the same time%s" $place . $count $field (first $asking) $other $hour -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (not $found) (gt (int64 $bounds.least) (int64 $bounds.most)) -}}
{{- $where := $place }}{{ with $bounds.held }}{{ $where = printf "%s.schedules.%d" $place (last . | int) }}{{ end -}}
{{- $found = printf "%s: minReplicas, %d, is above maxReplicas, %d,%s" $where (int64 $bounds.least) (int64 $bounds.most) $hour -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found -}}
{{- end }}

{{/* The first reason why the pools cannot keep the budget: takes (list policy zones). */}}
{{- define "pdserve.budgetProblem" -}}
{{- $policy := index . 0 -}}{{- $zones := index . 1 -}}
{{- $both := list $policy.pools.prefill $policy.pools.decode -}}
{{- $least := default 0 $policy.budget.minDevices | int64 }}{{ $most := int64 $policy.budget.maxDevices -}}
{{- $greatest := 0 }}{{ $fallback := 0 }}{{ $schedules := list -}}
{{- range $both -}}
{{- $replicas := int64 .maxReplicas }}{{ range .schedules }}{{ $replicas = max $replicas (default 0 .maxReplicas | int64) }}{{ end -}}
{{- $devices := default 1 .devicesPerReplica | int64 -}}
{{- $greatest = add $greatest (mul $devices $replicas) -}}
{{- $fallback = add $fallback (mul $devices (int64 (default 0 (default dict .fallback).replicas))) -}}
{{- $schedules = concat $schedules (default list .schedules) -}}
{{- end -}}
{{- $found := "" -}}
{{- if gt $least $most -}}
{{- $found = printf "budget.minDevices: %d is above maxDevices, %d" $least $most -}}
{{- else if gt $least $greatest -}}
{{- $found = printf "budget.minDevices: %d is above %d, what both pools hold at their maxReplicas" $least $greatest -}}
{{- else if gt $fallback $most -}}
{{- $found = printf "budget.maxDevices: %d is below %d, what fallback.replicas of both pools hold" $most $fallback -}}
{{- else -}}
{{- range include "pdserve.changes" (list $schedules $zones) | fromJsonArray -}}
{{- $unix := int64 . }}{{ $held := 0 -}}
{{- if not $found -}}
{{- range $both -}}
{{- $bounds := include "pdserve.bounds" (list . $zones $unix) | fromJson }}{{ $held = add $held (mul $bounds.devices (max 1 $bounds.least)) -}}
{{- end -}}
{{- if gt $held $most }}{{ $found = printf "budget.maxDevices: %d is below %d, what both pools need at least%s" $most $held (include "pdserve.hour" (list $unix $both)) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found -}}
{{- end }}
