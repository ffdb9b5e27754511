#include "text.h"

#include <stdbool.h>
#include <string.h>

/* The second byte has all restrictions: E0 and F0 exclude overlong forms, ED excludes surrogates, F4 ends at U+10FFFF.
 * A terminating NUL is never a continuation byte, so nothing after it is read. */
static bool is_whole(const unsigned char *s, int length)
{
    for (int i = 1; i < length; i++) {
        if ((s[i] & 0xc0) != 0x80) {
            return false;
        }
    }
    bool overlong = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool surrogate = s[0] == 0xed && s[1] > 0x9f;
    bool too_large = s[0] == 0xf4 && s[1] > 0x8f;
    return !overlong && !surrogate && !too_large;
}

int text_character(const char *text, uint32_t *code)
{
    static const unsigned char lead_bits[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    const unsigned char *s = (const unsigned char *)text;
    int length = s[0] < 0x80                   ? 1
                 : s[0] >= 0xc2 && s[0] < 0xe0 ? 2
                 : s[0] >= 0xe0 && s[0] < 0xf0 ? 3
                 : s[0] >= 0xf0 && s[0] < 0xf5 ? 4
                                               : 0;
    if (length == 0 || (length > 1 && !is_whole(s, length))) {
        return 0;
    }
    *code = s[0] & lead_bits[length];
    for (int i = 1; i < length; i++) {
        *code = *code << 6 | (s[i] & 0x3f);
    }
    return length;
}

/* Control characters, and marks that reorder text. */
static bool is_obeyed(uint32_t code)
{
    static const uint32_t ranges[][2] = {{0x00, 0x1f},     {0x7f, 0x9f},     {0x061c, 0x061c},
                                         {0x200e, 0x200f}, {0x2028, 0x202e}, {0x2066, 0x2069}};
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
        if (code >= ranges[i][0] && code <= ranges[i][1]) {
            return true;
        }
    }
    return false;
}

/* Escapes one character of `text`; sets the number of bytes consumed. */
static int show_character(const char *text, char shown[16])
{
    uint32_t code = 0;
    int length = text_character(text, &code);
    if (length == 0) {
        snprintf(shown, 16, "\\x%02x", (unsigned)(unsigned char)text[0]);
    } else if (is_obeyed(code)) {
        snprintf(shown, 16, code < 0x100 ? "\\x%02x" : "\\u%04x", (unsigned)code);
    } else {
        snprintf(shown, 16, "%.*s", length, text);
    }
    return length > 0 ? length : 1;
}

const char *text_show(const char *text, char shown[TEXT_SHOWN])
{
    static const char rest[] = "...";
    size_t used = 0;
    while (*text != '\0') {
        char piece[16];
        text += show_character(text, piece);
        size_t length = strlen(piece);
        if (used + length + sizeof rest > TEXT_SHOWN) {
            memcpy(shown + used, rest, sizeof rest);
            return shown;
        }
        memcpy(shown + used, piece, length);
        used += length;
    }
    shown[used] = '\0';
    return shown;
}

static bool needs_escapes(const char *text)
{
    uint32_t code;
    for (int length; *text != '\0'; text += length) {
        length = text_character(text, &code);
        if (length == 0 || is_obeyed(code)) {
            return true;
        }
    }
    return false;
}

/* $'...' is the only quoting of shells that can spell bytes. */
static void print_escaped(FILE *out, const char *text)
{
    fputs("$'", out);
    for (; *text != '\0'; text++) {
        unsigned byte = (unsigned char)*text;
        if (byte < 0x20 || byte > 0x7e) {
            fprintf(out, "\\%03o", byte); /* three digits: a following digit is not part of it */
        } else {
            fprintf(out, *text == '\'' || *text == '\\' ? "\\%c" : "%c", *text);
        }
    }
    fputc('\'', out);
}

void text_print_word(FILE *out, const char *text)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./+-:=@,%";
    if (needs_escapes(text)) {
        print_escaped(out, text);
    } else if (text[0] != '\0' && text[strspn(text, plain)] == '\0') {
        fputs(text, out);
    } else {
        fputc('\'', out);
        for (; *text != '\0'; text++) {
            fputs(*text == '\'' ? "'\\''" : (const char[]){*text, '\0'}, out);
        }
        fputc('\'', out);
    }
}
