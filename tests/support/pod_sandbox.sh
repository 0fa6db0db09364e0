# Runs a command as a container would: process 1, a read-only root, its own /dev, /etc and /var, and no rights.
# Arguments: the folder that lies at /var/cache/pdserve, a file with lines "SOURCE TARGET", user id, then the command.
set -eu
scratch=$1 mounts=$2 user=$3
shift 3
mount -t tmpfs none /mnt
mkdir -p /mnt/etc/up /mnt/etc/work /mnt/var/up /mnt/var/work /mnt/dev/shm
for top in etc var; do
  mount -t overlay overlay -o "lowerdir=/$top,upperdir=/mnt/$top/up,workdir=/mnt/$top/work" "/$top"
done
for node in null zero full random urandom; do
  : > "/mnt/dev/$node"
  mount --bind "/dev/$node" "/mnt/dev/$node"
done
mount -t tmpfs none /mnt/dev/shm
ln -s /proc/self/fd /mnt/dev/fd
: > /mnt/dev/termination-log
mount --rbind /mnt/dev /dev
mkdir -p /var/cache/pdserve
mount --bind "$scratch" /var/cache/pdserve
while read -r source target; do
  mkdir -p "$(dirname "$target")"
  if [ -d "$source" ]; then mkdir -p "$target"; else : >> "$target"; fi
  mount --bind "$source" "$target"
done < "$mounts"
mount -o remount,bind,ro /
cd /var/cache/pdserve
exec unshare --user "--map-user=$user" "--map-group=$user" -- "$@"
