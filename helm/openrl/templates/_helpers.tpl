{{/* Everything of a release is called after it. */}}
{{- define "openrl.labels" -}}
app.kubernetes.io/name: openrl
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: openrl
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "openrl.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "openrl.image" -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
openrl-{{ .part }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* The Secret with the store's address, and the key in it. */}}
{{- define "openrl.store" -}}
{{- if .Values.redis.enabled -}}
{name: {{ .Release.Name }}-redis, key: url}
{{- else -}}
{name: {{ required "externalRedis.secret: name the Secret with the store's address, or set redis.enabled: true" .Values.externalRedis.secret }}, key: {{ .Values.externalRedis.key }}}
{{- end -}}
{{- end }}

{{- define "openrl.adminSecret" -}}
{{ .Values.secrets.adminKey | default (printf "%s-admin-key" .Release.Name) }}
{{- end }}

{{- define "openrl.flowerSecret" -}}
{{ .Values.flower.secret | default (printf "%s-flower" .Release.Name) }}
{{- end }}

{{/* What every part is told: `settings`, and over them what else is given by name. */}}
{{- define "openrl.env" -}}
{{- include "openrl.envWith" (dict "root" . "more" dict) }}
{{- end }}

{{/* What workers are told, and whoever has to know how they run: of `pools.env` our own settings. */}}
{{- define "openrl.poolSettings" -}}
{{- $ours := dict }}
{{- range $name, $value := .Values.pools.env }}
{{- if hasPrefix "OPENRL_" $name }}{{ $_ := set $ours $name $value }}{{ end }}
{{- end }}
{{- include "openrl.envWith" (dict "root" . "more" $ours) }}
{{- end }}

{{- define "openrl.envWith" -}}
- {name: HOME, value: /tmp}
- {name: OPENRL_DATA_DIR, value: /data/openrl}
- name: OPENRL_REDIS_URL
  valueFrom:
    secretKeyRef: {{ include "openrl.store" .root }}
{{- range $name, $value := merge (dict) .more .root.Values.settings }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "openrl.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "openrl.containerSecurity" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{- define "openrl.pod" -}}
serviceAccountName: {{ .root.Release.Name }}-{{ .part }}
automountServiceAccountToken: {{ .token | default false }}
enableServiceLinks: false
securityContext:
  {{- include "openrl.podSecurity" .root | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- {name: {{ . }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "openrl.volumes" -}}
- name: tmp
  emptyDir: {}
- name: data
  persistentVolumeClaim: {claimName: {{ .Values.storage.existingClaim | default (printf "%s-data" .Release.Name) }}}
{{- with .Values.modelVolume.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "openrl.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: data, mountPath: /data}
{{- if .Values.modelVolume.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}
