{{/* Several models of one release. */}}

{{/*
The roots with which the templates of a model are rendered: takes (list holder root), and sets `roots` of the holder. One
model has the root itself. Of `models` each entry has one: its values lie over the chart's, and its policy is in place of
the chart's. Its name lies behind the release's. Secrets and certificates are those of the release.
*/}}
{{- define "pdserve.setRoots" -}}
{{- $top := index . 1 -}}{{- $roots := list -}}
{{- range $entry := $top.Values.models -}}
{{- $values := mergeOverwrite (dict) (deepCopy $top.Values) (omit $entry "name" | deepCopy) -}}
{{- with (default dict $entry.autoscaling).policy }}{{ $_ := set $values.autoscaling "policy" . }}{{ end -}}
{{- $_ := set $values.secret "existingSecret" (include "pdserve.secretName" $top) -}}
{{- $_ := set $values.keys "existingSecret" (include "pdserve.keysName" $top) -}}
{{- $_ := set $values.tls "public" (dict "from" "secret" "existingSecret" (include "pdserve.tlsName" $top) "dnsNames" list "issuerRef" dict) -}}
{{- if ne $values.tls.identity.from "none" -}}
{{- $secrets := dict -}}
{{- range list "router" "frontend" "worker" "operator" }}{{ $_ := set $secrets . (include "pdserve.identityName" (list $top .)) }}{{ end -}}
{{- $_ := set $values.tls "identity" (dict "from" "secret" "existingSecrets" $secrets "issuerRef" dict) -}}
{{- end -}}
{{- $roots = append $roots (dict "Values" $values "Model" $entry.name "Entry" $entry "Top" $top "Chart" $top.Chart "Release" $top.Release "Files" $top.Files "Capabilities" $top.Capabilities "Template" $top.Template) -}}
{{- end -}}
{{- $_ := set (index . 0) "roots" ($roots | default (list $top)) -}}
{{- end }}

{{/* What a template renders for each model: takes (list root template). */}}
{{- define "pdserve.forEachModel" -}}
{{- $all := dict }}{{ include "pdserve.setRoots" (list $all (index . 0)) }}
{{- $template := index . 1 }}
{{- range $all.roots }}
---
{{ include $template . }}
{{- end }}
{{- end }}

{{/* `models` of the frontends' settings, as JSON. */}}
{{- define "pdserve.frontendModels" -}}
{{- $all := dict }}{{ include "pdserve.setRoots" (list $all .) }}
{{- $models := list -}}
{{- range $root := $all.roots -}}
{{- $config := (include "pdserve.values" (list $root "frontend") | fromJson).config | default dict -}}
{{- $own := pick (mergeOverwrite $config (dig "router" "config" dict $root.Entry)) "served_model_aliases" "generation_config" "tool_call_parser" "reasoning_parser" "allow_special_tokens_in_text" "max_model_len" "lenient_schemas" -}}
{{- $_ := set $own "model" (include "pdserve.modelPath" $root) -}}
{{- $_ := set $own "routers" (list (include "pdserve.routers" $root)) -}}
{{- $_ := set $own "served_model_name" (include "pdserve.servedName" $root) -}}
{{- $models = append $models $own -}}
{{- end -}}
{{- toJson $models -}}
{{- end }}

{{/* What is wrong with `models` beyond what is wrong with each, as a JSON list. */}}
{{- define "pdserve.modelsProblems" -}}
{{- $all := dict }}{{ include "pdserve.setRoots" (list $all .) }}
{{- $problems := list }}{{ $names := dict }}{{ $served := dict -}}
{{- range $place, $root := $all.roots -}}
{{- $key := printf "models.%d" $place -}}
{{- if hasKey $names $root.Model }}{{ $problems = append $problems (printf "%s.name: %s is there twice" $key $root.Model) }}{{ end -}}
{{- $_ := set $names $root.Model true -}}
{{- if regexMatch "-(prefill|decode|autoscaler)(-|$)" $root.Model }}{{ $problems = append $problems (printf "%s.name: %s has the name of a component in it, and KEDA's queries find pods by how their names begin" $key $root.Model) }}{{ end -}}
{{- if not (include "pdserve.servedName" $root) }}{{ $problems = append $problems (printf "%s.model.servedName: is required" $key) }}{{ end -}}
{{- range $name := prepend (dig "router" "config" "served_model_aliases" list $root.Entry) (include "pdserve.servedName" $root) | compact -}}
{{- if hasKey $served $name }}{{ $problems = append $problems (printf "%s: %s is the name of two" $key $name) }}{{ end -}}
{{- $_ := set $served $name true -}}
{{- end -}}
{{- $full := include "pdserve.name" $root -}}
{{- if gt (len $full) 50 }}{{ $problems = append $problems (printf "%s.name: %s has %d characters; 50 are the limit, and fullnameOverride may be shorter" $key $full (len $full)) }}{{ end -}}
{{- if and (eq $root.Values.autoscaling.by "hpa") (eq $root.Values.autoscaling.follow "desired") -}}
{{- $problems = append $problems (printf "%s.autoscaling.follow: desired goes with pdserve or keda where there are several models: an HPA would take any model's" $key) -}}
{{- end -}}
{{- end -}}
{{- range list "path" "servedName" }}{{ if index $.Values.model . }}{{ $problems = append $problems (printf "model.%s: goes into each of models, where there are several" .) }}{{ end }}{{ end -}}
{{- if .Values.model.hub.repository }}{{ $problems = append $problems "model.hub.repository: goes into each of models, where there are several" }}{{ end -}}
{{- if and (eq .Values.model.source "hub") (not .Values.model.persistence.enabled) }}{{ $problems = append $problems "model.persistence.enabled: must be true where several models come from the hub" }}{{ end -}}
{{- range list "router" "frontends" -}}
{{- if (default dict (index $.Values .).config).served_model_aliases }}{{ $problems = append $problems (printf "%s.config.served_model_aliases: goes with one model" .) }}{{ end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end }}
