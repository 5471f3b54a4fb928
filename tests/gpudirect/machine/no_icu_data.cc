// ICU's data, for the program that travels: none. It is 30 MB of locales, and what the tokenizer
// asks for is built into ICU's code.
#include <unicode/utypes.h>

extern "C" {
extern const long U_ICUDATA_ENTRY_POINT[2];
const long U_ICUDATA_ENTRY_POINT[2] = {0, 0};
}
