/* Writes PNG files in color. Rows are stored as their difference from the row above, which for a drawing is mostly
 * zeros, and packed as deflate with its fixed codes and no matches but runs of one byte: a page of white shrinks a
 * hundredfold, and the whole of it is on this page. */
#include "png_rgb.h"

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct packer {
    unsigned char *bytes;
    size_t count;
    uint32_t bits; /* waiting for a whole byte, the first one lowest */
    int waiting;
} packer;

/* `count` bits of `value`, the lowest first. */
static void put_bits(packer *p, uint32_t value, int count)
{
    p->bits |= value << p->waiting;
    p->waiting += count;
    while (p->waiting >= 8) {
        p->bytes[p->count++] = (unsigned char)p->bits;
        p->bits >>= 8;
        p->waiting -= 8;
    }
}

/* A code of deflate, which stands with its highest bit first. */
static void put_code(packer *p, uint32_t code, int count)
{
    for (int i = count - 1; i >= 0; i--) {
        put_bits(p, code >> i & 1, 1);
    }
}

/* A byte, or a symbol from 256 on, in the fixed code. */
static void put_symbol(packer *p, uint32_t symbol)
{
    if (symbol < 144) {
        put_code(p, 0x30 + symbol, 8);
    } else if (symbol < 256) {
        put_code(p, 0x190 + symbol - 144, 9);
    } else if (symbol < 280) {
        put_code(p, symbol - 256, 7);
    } else {
        put_code(p, 0xc0 + symbol - 280, 8);
    }
}

/* The byte before, `length` times more: 3 to 258. Symbols come in groups of four with one more extra bit each. */
static void put_run(packer *p, int length)
{
    int extra = 0, base = length - 3;
    if (length == 258) {
        put_symbol(p, 285);
    } else {
        while (base >> extra >= 8) {
            extra++;
        }
        put_symbol(p, (uint32_t)(257 + 4 * extra + (base >> extra)));
        put_bits(p, (uint32_t)(base & ((1 << extra) - 1)), extra);
    }
    put_code(p, 0, 5); /* at a distance of 1 */
}

static void pack(packer *p, const unsigned char *data, size_t size)
{
    put_bits(p, 1, 1); /* the last block */
    put_bits(p, 1, 2); /* fixed codes */
    for (size_t i = 0; i < size;) {
        size_t run = 0;
        while (i > 0 && i + run < size && run < 258 && data[i + run] == data[i - 1]) {
            run++;
        }
        if (run >= 3) {
            put_run(p, (int)run);
            i += run;
        } else {
            put_symbol(p, data[i++]);
        }
    }
    put_symbol(p, 256);
    put_bits(p, 0, 7); /* fills the last byte */
}

static uint32_t adler(const unsigned char *data, size_t size)
{
    uint32_t a = 1, b = 0;
    for (size_t i = 0; i < size; i++) {
        a = (a + data[i]) % 65521;
        b = (b + a) % 65521;
    }
    return b << 16 | a;
}

static uint32_t crc(uint32_t value, const unsigned char *data, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        value ^= data[i];
        for (int k = 0; k < 8; k++) {
            value = value >> 1 ^ (value & 1 ? 0xedb88320u : 0);
        }
    }
    return value;
}

static void big_endian(uint32_t value, unsigned char bytes[4])
{
    for (int i = 0; i < 4; i++) {
        bytes[i] = (unsigned char)(value >> (24 - 8 * i));
    }
}

static void write_chunk(FILE *out, const char *name, const unsigned char *data, size_t size)
{
    unsigned char number[4];
    uint32_t check = crc(crc(0xffffffffu, (const unsigned char *)name, 4), data, size) ^ 0xffffffffu;
    big_endian((uint32_t)size, number);
    fwrite(number, 1, 4, out);
    fwrite(name, 1, 4, out);
    fwrite(data, 1, size, out);
    big_endian(check, number);
    fwrite(number, 1, 4, out);
}

/* Each row with the number of its filter, 2, before it, and less the row above. */
static void filter(const unsigned char *pixels, size_t stride, size_t rows, unsigned char *out)
{
    for (size_t y = 0; y < rows; y++) {
        *out++ = 2;
        for (size_t x = 0; x < stride; x++, pixels++) {
            *out++ = (unsigned char)(*pixels - (y > 0 ? pixels[-(ptrdiff_t)stride] : 0));
        }
    }
}

static void write_image(FILE *out, int width, int height, packer *p, const unsigned char *rows, size_t size)
{
    unsigned char header[13] = {[8] = 8, [9] = 2}; /* eight bits, three colors */
    big_endian((uint32_t)width, header);
    big_endian((uint32_t)height, header + 4);
    p->bytes[0] = 0x78, p->bytes[1] = 0x01, p->count = 2; /* zlib's two bytes */
    pack(p, rows, size);
    big_endian(adler(rows, size), p->bytes + p->count);
    p->count += 4;
    fwrite("\x89PNG\r\n\x1a\n", 1, 8, out);
    write_chunk(out, "IHDR", header, sizeof header);
    write_chunk(out, "IDAT", p->bytes, p->count);
    write_chunk(out, "IEND", header, 0);
}

bool png_write_rgb(FILE *out, int width, int height, const unsigned char *pixels)
{
    size_t stride = 3 * (size_t)width, size = (stride + 1) * (size_t)height;
    unsigned char *rows = calloc(size, 1);
    packer p = {.bytes = malloc(size + size / 8 + 64)}; /* no symbol is longer than nine bits */
    bool ready = rows != NULL && p.bytes != NULL;
    if (ready) {
        filter(pixels, stride, (size_t)height, rows);
        write_image(out, width, height, &p, rows, size);
    } else {
        errno = ENOMEM;
    }
    free(rows);
    free(p.bytes);
    return ready && fflush(out) == 0 && !ferror(out);
}
