#!/bin/sh
# Downloads the archive at MODELS_URL, checks that its digest is MODELS_SHA256, and unpacks it into MODELS_FOLDER. A transfer
# of less than 1 KB/s for MODELS_STALL_S seconds is begun again.
set -eu
archive="$MODELS_FOLDER/.archive"
curl --fail --silent --show-error --location --retry 5 --retry-connrefused --connect-timeout 10 \
    --speed-limit 1000 --speed-time "${MODELS_STALL_S:-60}" --output "$archive" "$MODELS_URL"
if ! echo "$MODELS_SHA256  $archive" | sha256sum -c - >/dev/null 2>&1; then
    echo "MODELS_SHA256: expected $MODELS_SHA256, got $(sha256sum "$archive" | cut -d ' ' -f 1) from $MODELS_URL" >&2
    exit 1
fi
tar -xf "$archive" -C "$MODELS_FOLDER"
rm "$archive"
