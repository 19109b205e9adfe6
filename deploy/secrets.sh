#!/bin/sh
# Makes the secrets of an installation in a folder, once: passwords of the broker's users, the
# master key, an API key. What is there is kept.
#
#   deploy/secrets.sh deploy/secrets
set -eu
umask 077
folder=$1
mkdir -p "$folder"
cd "$folder"

make() { # FILE PREFIX COMMAND...: what the command prints, behind a prefix
    file=$1 prefix=$2
    shift 2
    test -s "$file" || printf '%s%s\n' "$prefix" "$("$@")" >"$file"
}

for user in gateway trainer sampler checkpointer operator region; do
    # A letter first: nats-server takes what looks like a number for one.
    make "${user}_password" p openssl rand -hex 24
done
make master_key "" openssl rand -base64 32
make api_keys tml- openssl rand -hex 24

for user in gateway trainer sampler checkpointer operator region; do
    name=$(printf %s "$user" | tr '[:lower:]' '[:upper:]')
    printf 'NATS_%s_PASSWORD=%s\n' "$name" "$(cat "${user}_password")"
done >broker.env
# The services in containers are user 10001; only the folder keeps others of this host out.
chmod 0644 ./*
