/* JSON texts of any bytes; see fuzz_core.c. */
#include "tests/fuzz_core.h"

#include <stdlib.h>

#include "codec/json.h"

int fuzz_json(const uint8_t *data, size_t len) {
    size_t at;
    const int sane = json_text(data, len, &at);
    if (at > len || (sane && at != len)) abort();
    const uint32_t ends[2] = {0, (uint32_t)len};
    const row_column_t texts = {data, len, (const uint8_t *)ends, sizeof ends, NULL, 0, 0, 1};
    uint8_t validity;
    uint32_t offsets[2], row;
    uint64_t where;
    if (len > INT32_MAX) return 0;
    const uint32_t name_ends[2] = {1, 2};
    const json_names_t names = {(const uint8_t *)"ka", name_ends, 2};
    if (json_member_offsets(&texts, &names, 0, &validity, offsets, &row, &where) != STATUS_OK) {
        return sane;
    }
    uint8_t *out = malloc((size_t)offsets[1] + 1);
    if (out != NULL) json_member_bytes(&texts, &names, 0, offsets, out, offsets[1]);
    free(out);
    return sane;
}
